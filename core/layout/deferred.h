#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/layout/flat_layout.h"

namespace tessera {

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
  DeferredScope scope;
  return build();
}

// Whether the tensor awaits its values.
bool is_deferred(const at::Tensor& tensor);

// Whether a DeferredScope is open in this thread.
bool is_deferring();

// While it lives, operators of this thread are ordinary ones, in deferred() too: for what is read and not built.
class OrdinaryScope {
 public:
  OrdinaryScope();

 private:
  c10::impl::ExcludeDispatchKeyGuard ordinary_;
};

// Reads the elements [begin, end) of a tensor, in the order in which they lie in memory, into host memory.
using ReadElements = std::function<void(Range elements, void* target)>;

// A deferred tensor whose values are somewhere, a file say, from where `read` brings any part of them:
// FullyShardedDataParallel has each rank read its own part, whatever FsdpOptions::sync_module_states says. On `device`
// once it is filled. Strides without holes or overlaps. An operator on it inside deferred() throws std::logic_error:
// what it does could not be repeated for a part.
at::Tensor deferred_from(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, at::ScalarType dtype,
                         at::Device device, ReadElements read);

// How such a tensor is read; null for any other.
const ReadElements* reader_of(const at::Tensor& tensor);

// Where a tensor's values are or, of a deferred one, will be: what is computed by constructors, on the CPU.
at::Device device_of_values(const at::Tensor& tensor);

// Computes the values of deferred tensors, in the order in which the constructors did. `batches` says which are wanted
// together; ready(batch, values) is called once for each batch, as soon as its values are final, with tensors of the
// given ones' shapes and strides, on the device that the constructor named. Memory is freed as soon as neither the rest
// of the tape nor a batch needs it. A batch of none, or of what is read, is ready at the start. Values can be computed
// again.
void replay_deferred(const std::vector<std::vector<at::Tensor>>& batches,
                     const std::function<void(size_t batch, const std::vector<at::Tensor>& values)>& ready);

// Turns a deferred tensor into an ordinary one with the data of `values`, keeping its identity.
void fill_deferred(const at::Tensor& tensor, const at::Tensor& values);

// Fills all deferred parameters and buffers of a module: for use without a wrapper.
void materialize(torch::nn::Module& module);

}  // namespace tessera
