#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/nn/module.h>

#include <memory>

namespace tessera {

namespace internal {

class Tape;

// While an object of this class exists, this thread's factory operators make tensors on the meta device, without data.
// Operators on these tensors are recorded. A nested scope throws std::logic_error. See deferred().
class DeferredScope {
 public:
  // Throws std::runtime_error if another library uses the dispatch key that records operators.
  DeferredScope();
  ~DeferredScope();
  DeferredScope(const DeferredScope&) = delete;
  DeferredScope& operator=(const DeferredScope&) = delete;

 private:
  std::shared_ptr<Tape> tape_;
  c10::impl::IncludeDispatchKeyGuard recording_;
};

}  // namespace internal

// Builds a module whose parameters and buffers have no memory yet:
//
//   auto model = tessera::deferred([&] { return Gpt(config); });
//   tessera::FullyShardedDataParallel fsdp(model, comm, {...});   // fills it unit by unit
//
// Constructors run unmodified (torchdistX's deferred_init). The values will be bit for bit those of an ordinary build()
// at the time of this call. If build() draws, this call advances the default CPU generator by one number, so a second
// module has values of its own. A constructor that reads or writes values directly (item(), data_ptr(), torch::tensor
// of a vector) throws. Some operators have a meta kernel in Python only (flip, where, complex and others in 2.11). Such
// operators also run once on zeros and ones, to find the shapes of their results. An operator whose shape depends on
// values throws std::logic_error with its name. Call such an operator before deferred(), and copy its result. Values
// are computed on the CPU, or on another device that a constructor names, with that device's generator.
template <class Build>
auto deferred(Build build) {
  internal::DeferredScope scope;
  return build();
}

// Returns whether the tensor was made inside deferred() and has no values yet.
bool is_deferred(const at::Tensor& tensor);

// Computes the values of all deferred parameters and buffers of a module, for use without a wrapper.
void materialize(torch::nn::Module& module);

}  // namespace tessera
