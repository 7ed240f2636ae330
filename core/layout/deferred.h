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

// Whether this thread has an open DeferredScope.
bool is_deferring();

// While it exists, this thread's operators are not recorded, even in deferred(). For reading values.
class OrdinaryScope {
 public:
  OrdinaryScope();

 private:
  c10::impl::ExcludeDispatchKeyGuard ordinary_;
};

// Reads the elements [begin, end) of a tensor, in memory order, into host memory.
using ReadElements = std::function<void(Range elements, void* target)>;

// Makes a deferred tensor whose values `read` can load in any part, from a file for example. FullyShardedDataParallel
// lets each rank read its own part, regardless of FsdpOptions::sync_module_states. The filled tensor is on `device`.
// Strides must have no holes or overlaps. In deferred(), an operator on it throws std::logic_error, because the
// operator could not be replayed for a part.
at::Tensor deferred_from(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, at::ScalarType dtype,
                         at::Device device, ReadElements read);

// The reader of a tensor of deferred_from(); null for other tensors.
const ReadElements* reader_of(const at::Tensor& tensor);

// The device of a tensor's values, now or once they are filled in; the CPU for recorded constructors.
at::Device device_of_values(const at::Tensor& tensor);

// Computes the values of deferred tensors by replaying the recorded calls. Each batch lists tensors that are needed
// together. Calls ready(batch, values) once for each batch, as soon as its values are final. Values have the shapes and
// strides of the given tensors, on the device that the constructor named. Memory is freed as soon as no later call or
// batch needs it. A batch that is empty, or whose tensors have a reader, is ready at the start. May be called again.
void replay_deferred(const std::vector<std::vector<at::Tensor>>& batches,
                     const std::function<void(size_t batch, const std::vector<at::Tensor>& values)>& ready);

// Gives a deferred tensor the data of `values`. Keeps its TensorImpl.
void fill_deferred(const at::Tensor& tensor, const at::Tensor& values);

}  // namespace tessera::internal
