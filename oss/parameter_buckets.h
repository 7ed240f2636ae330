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

// The minimum number of bytes that a rank steps in one turn, if it alternates between stepping and publishing. With
// fewer bytes, calls of the optimizer's operators would cost too much. Tests lower this number.
inline int64_t least_step_bytes = int64_t{8} << 20;
// The factor on least_step_bytes for a device, which computes faster than a CPU but launches operators no faster.
inline constexpr int64_t kDeviceStepFactor = 32;

// Publishes parameters in buckets, from their owners to all ranks, after a step.
//
// A bucket's memory is cut by owner, and its parameters are views of this memory. So one in-place all-gather updates
// all of them. A large parameter is a bucket by itself, in its own memory. So publishing copies nothing.
//
// A parameter that shares its memory with other tensors (a kept view, a second model) also stays in its memory. Its
// values are copied to the bucket and back. Ranks may differ in this, because the all-gather is the same.
class ParameterBuckets {
 public:
  // Moves the values of small parameters into buckets of at most `bucket_bytes`, and makes the parameters views of the
  // buckets. Keeps their TensorImpl, to which modules and hooks refer. `owners` has a rank for each parameter.
  // `broadcast_dtype` is the dtype of published values; the owner keeps its exact values.
  ParameterBuckets(std::vector<at::Tensor> parameters, std::vector<int> owners, int64_t bucket_bytes,
                   std::optional<at::ScalarType> broadcast_dtype, Communicator& comm);

  // Returns the values that this rank receives if the owner sends `values`: they are rounded to broadcast_dtype.
  // Returns `values` if this rank owns the parameter, or the parameter is not published or not rounded.
  at::Tensor as_received(const at::Tensor& parameter, const at::Tensor& values) const;

  // Throws std::logic_error, with the parameter's number, if a parameter to publish has another dtype, shape or device
  // than at construction. Not collective.
  void require_unconverted() const;

  // Moves parameters that set_data() has given other memory or strides back into their buckets, unless other tensors
  // use the buckets' memory. Must be called before a step. Not collective.
  void reattach();

  // Starts to send each bucket that has ever had a trained parameter from its owners to all ranks. Logs the operations
  // in `log`, and returns them for finish(). Collective. `step_owned` is called with groups of this rank's parameters,
  // each once, and must step them. A bucket is sent when its parameters were stepped, while the next ones are stepped.
  struct PendingGather;
  using StepOwned = std::function<void(const std::vector<at::Tensor>& parameters)>;
  std::vector<PendingGather> publish(CollectiveLog& log, const StepOwned& step_owned = nullptr);
  void finish(std::vector<PendingGather>& gathers);

 private:
  struct Bucket {
    std::string name;
    std::vector<size_t> members;  // indices of parameters, sorted by owner
    std::vector<ParameterGeometry> geometries;
    FlatLayout layout;
    std::vector<TensorSignature> kinds;
    at::Tensor flat;          // undefined: the only member keeps its own memory
    std::vector<bool> stays;  // by member: whether it stays in its own memory
    // Whether a member has ever required a gradient. Such a bucket is always published, because a member may be frozen
    // between a backward and its step.
    bool has_trained = false;
  };
  void plan(int64_t bucket_bytes);
  Bucket make_bucket(std::vector<size_t> members) const;
  void adopt(Bucket& bucket);        // makes members views of the bucket's memory
  void adopt_again(Bucket& bucket);  // adopts again, after the user gave members other memory
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
  CountedBuffers buffers_;  // for values that are sent in broadcast_dtype
  std::vector<Bucket> buckets_;
};

struct ParameterBuckets::PendingGather {
  const Bucket* bucket;
  at::Tensor values;  // [layout.full_numel()]
  at::Tensor wire;    // the sent tensor: the values, or a copy in another dtype
  Pending pending;
};

}  // namespace tessera::internal
