#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/nn/module.h>

#include <memory>

namespace tessera {

namespace internal {

class Tape;

// While it lives, operators of this thread that make tensors make them on the meta device, without data, and what
// happens to those is written down instead of done. An inner one throws std::logic_error. See deferred().
class DeferredScope {
 public:
  // Throws std::runtime_error if another library has taken the dispatch key.
  DeferredScope();
  ~DeferredScope();
  DeferredScope(const DeferredScope&) = delete;
  DeferredScope& operator=(const DeferredScope&) = delete;

 private:
  std::shared_ptr<Tape> tape_;
  c10::impl::IncludeDispatchKeyGuard recording_;
};

}  // namespace internal

// Builds a module whose parameters and buffers take no memory yet:
//
//   auto model = tessera::deferred([&] { return Gpt(config); });
//   tessera::FullyShardedDataParallel fsdp(model, comm, {...});   // fills it unit by unit
//
// Constructors run unmodified (torchdistX's deferred_init). The values, when they are filled in, are bit for bit those
// of an ordinary build() here and now: random numbers come from the state that the default CPU generator has at this
// call, which is not advanced, then or later. A constructor may do anything to tensors but read or write their values
// directly (item(), data_ptr(), torch::tensor of a vector): that throws. So do operators for which libtorch has no meta
// kernel outside Python (flip and randperm in 2.11): call those before, and fill from the result. On the CPU:
// constructors that name another device draw from that device's own generator.
template <class Build>
auto deferred(Build build) {
  internal::DeferredScope scope;
  return build();
}

// Whether the tensor awaits its values.
bool is_deferred(const at::Tensor& tensor);

// Fills all deferred parameters and buffers of a module: for use without a wrapper.
void materialize(torch::nn::Module& module);

}  // namespace tessera
