#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <tessera/communicator.h>
#include "core/gradients/collective_log.h"
#include "core/layout/flat_layout.h"
#include "core/layout/geometry.h"
#include "core/layout/tensor_signature.h"
#include "core/memory/counted_buffers.h"

namespace tessera::internal {

// If steps overlap with publishing, a rank steps its parameters in turns of at least this many bytes in total. It
// publishes after each turn. Smaller turns would make the overhead of the optimizer's calls too large. Tests use fewer.
inline int64_t least_step_bytes = int64_t{8} << 20;
// Factor for least_step_bytes on a device. There computation is faster than on a CPU, but calls have as much overhead.
inline constexpr int64_t kDeviceStepFactor = 32;

// Returns whether an optimizer steps the parameter: it is trainable, or it is frozen but has a gradient.
inline bool is_stepped(const at::Tensor& parameter) { return parameter.requires_grad() || parameter.grad().defined(); }

// Publishes parameters after a step: sends the owners' values to all ranks, in buckets.
//
// A bucket's memory is cut by owner, and its parameters are views of this memory. So one in-place all-gather updates
// all parameters of a bucket. A large parameter is its own bucket, in its own memory. So publishing copies no values.
//
// A parameter also keeps its own memory if other tensors share it (a kept view, a second model). Its owner then copies
// the values to the bucket, and other ranks copy them back. Each rank decides alone: the all-gather is the same.
class ParameterBuckets {
 public:
  // Moves the values of small parameters into buckets of at most `bucket_bytes`. Makes these parameters views of the
  // buckets, and keeps their TensorImpls, because modules and hooks refer to them. `owners` has a rank for each
  // parameter. `broadcast_dtype` is the dtype of published values; the owner keeps its exact values.
  ParameterBuckets(std::vector<at::Tensor> parameters, std::vector<int> owners, int64_t bucket_bytes,
                   std::optional<at::ScalarType> broadcast_dtype, Communicator& comm);

  // Returns `values` as this rank would receive them from the parameter's owner: rounded to broadcast_dtype. Returns
  // `values` unchanged if this rank owns the parameter, or if the parameter is not published or not rounded.
  at::Tensor as_received(const at::Tensor& parameter, const at::Tensor& values) const;

  // Throws std::logic_error, with the parameter's number, if a published parameter has changed its dtype, shape or
  // device since construction. Not collective.
  void require_unconverted() const;

  // Moves parameters back into their buckets after set_data() gave them other memory or strides, unless other tensors
  // use the buckets' memory. Must be called before a step. Not collective.
  void reattach();

  // Publishes each bucket that has ever had a trained parameter. Adds the operations to `log`, and returns them for
  // finish(). Collective. Unless null, `step_owned` receives this rank's parameters in disjoint sets, and must step
  // them. A bucket is sent once its parameters are stepped, while `step_owned` steps those of the next buckets.
  struct PendingGather;
  using StepOwned = std::function<void(const std::vector<at::Tensor>& parameters)>;
  std::vector<PendingGather> publish(CollectiveLog& log, const StepOwned& step_owned = nullptr);
  void finish(std::vector<PendingGather>& gathers);

 private:
  struct Bucket {
    std::string name;
    std::vector<size_t> members;  // parameter indices, sorted by owner
    std::vector<ParameterGeometry> geometries;
    FlatLayout layout;
    std::vector<TensorSignature> kinds;
    at::Tensor flat;          // the bucket's memory; undefined if the only member keeps its own memory
    std::vector<bool> stays;  // by member: whether the member keeps its own memory
    // Whether a member has ever required a gradient, or had one at construction. If so, the bucket is always published,
    // because the user may freeze a member between a backward and the step.
    bool has_trained = false;
  };
  void plan(int64_t bucket_bytes);
  Bucket make_bucket(std::vector<size_t> members) const;
  void adopt(Bucket& bucket);        // makes members views of the bucket's memory
  void adopt_again(Bucket& bucket);  // moves members back after the user replaced their memory
  bool is_in_place(const Bucket& bucket, size_t member) const;
  bool is_shared(const Bucket& bucket, size_t member) const;
  at::Tensor view_of(const Bucket& bucket, size_t member) const {
    return view_in(bucket.flat, bucket.geometries[member], bucket.layout.offset(static_cast<int64_t>(member)));
  }
  void note_trained();
  bool trains(const Bucket& bucket) const;
  bool is_rounded(at::ScalarType dtype) const;
  std::vector<at::Tensor> owned_outside_buckets() const;
  int64_t add_owned(const Bucket& bucket, std::vector<at::Tensor>& to) const;
  PendingGather start(Bucket& bucket);
  void finish(PendingGather& gather);

  const std::vector<at::Tensor> parameters_;
  const std::vector<int> owners_;
  const std::optional<at::ScalarType> broadcast_dtype_;
  Communicator& comm_;
  CountedBuffers buffers_;  // buffers for values that are sent in broadcast_dtype
  std::vector<Bucket> buckets_;
};

struct ParameterBuckets::PendingGather {
  const Bucket* bucket;
  at::Tensor values;  // [layout.full_numel()]
  at::Tensor wire;    // the tensor to send: `values`, or a copy in another dtype
  Pending pending;
};

}  // namespace tessera::internal
