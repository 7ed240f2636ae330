#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <functional>
#include <vector>

#include <tessera/deferred.h>
#include <tessera/model/range.h>

namespace tessera::internal {

bool is_deferring();  // whether this thread has an open DeferredScope

// While an OrdinaryScope exists, this thread's operators are not recorded, even in deferred(). Used to read values.
class OrdinaryScope {
 public:
  OrdinaryScope();

 private:
  c10::impl::ExcludeDispatchKeyGuard ordinary_;
};

// Reads the range `elements` of a tensor, counted in memory order, into host memory at `target`.
using ReadElements = std::function<void(Range elements, void* target)>;

// Makes a deferred tensor. `read` can load any range of its values, for example from a file. FullyShardedDataParallel
// lets each rank read its own range, regardless of FsdpOptions::sync_module_states. The filled tensor is on `device`.
// Strides must have no holes or overlaps. In deferred(), an operator on such a tensor throws std::logic_error, because
// the operator could not be replayed for a range.
at::Tensor deferred_from(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, at::ScalarType dtype,
                         at::Device device, ReadElements read);

// Returns the reader of a tensor from deferred_from(); null for other tensors.
const ReadElements* reader_of(const at::Tensor& tensor);

// Returns the device of the tensor's values: for a deferred tensor, the one on which they will be computed or read.
at::Device device_of_values(const at::Tensor& tensor);

// Computes the values of deferred tensors: replays the recorded calls, and reads the values of deferred_from() tensors.
// Each batch lists tensors that are needed together. Calls ready(batch, values) once for each batch, as soon as its
// values are final; first for batches with only deferred_from() tensors. Values have the shapes and strides of the
// tensors, and the device of the recorded constructor call or of deferred_from(). Frees intermediate tensors after
// their last use. A second call computes the values again. Throws std::invalid_argument for a tensor that is not
// deferred.
void replay_deferred(const std::vector<std::vector<at::Tensor>>& batches,
                     const std::function<void(size_t batch, const std::vector<at::Tensor>& values)>& ready);

// Makes a deferred tensor share the data of `values`. Keeps the tensor's TensorImpl.
void fill_deferred(const at::Tensor& tensor, const at::Tensor& values);

}  // namespace tessera::internal
