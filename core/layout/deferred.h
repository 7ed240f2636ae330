#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <tessera/deferred.h>
#include <tessera/model/range.h>

namespace tessera::internal {

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

}  // namespace tessera::internal
