#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include <tessera/communicator.h>
#include "core/gradients/bucket_content.h"
#include "core/gradients/gradient_bucket.h"
#include "core/layout/mesh.h"
#include "core/memory/counted_buffers.h"
#include "core/runtime/copy_engine.h"

namespace tessera::internal {

// The settings of GradientReducer that depend on the wrapper.
struct ReducerOptions {
  bool refuse_uneven_use = false;  // see FsdpOptions::refuse_uneven_use
  bool check_finite = false;
  bool backend_all_reduce = false;  // see DdpOptions::backend_all_reduce
  bool is_static = false;           // all passes use the same parameters, so ranks compare only the first pass
  size_t in_flight = 2;             // limit of reductions in flight in each stage of ReductionQueue
  size_t max_lazy_in_flight = 2;    // limit of lazy reductions in flight, which progress only in wait()
  // A gradient of at least this many bytes may be reduced directly from autograd's memory. For a smaller gradient, a
  // copy into the bucket costs less than a separate message.
  int64_t zero_copy_bytes = int64_t{256} << 10;
  // Copies the reduced gradients of offloaded buckets from `staging` buffers to the host. Null if none is offloaded.
  CopyEngine* to_host = nullptr;
  CountedBuffers* staging = nullptr;
};

// An in-flight reduction of one bucket's content.
struct PendingReduction {
  size_t bucket;
  BucketContent content;
  at::Tensor wire{};      // the encoded bytes that this rank sends; undefined if not encoded
  at::Tensor received{};  // the encoded parts of all ranks; undefined if the collective computes the sum
  at::Tensor reduced{};   // this rank's part of the result; undefined if this rank gets none
  at::Tensor staging{};   // device memory for a result that is copied to the host; else undefined
  Pending pending{};
  Copy copy{};
  // The tensor on the communicator's device that receives the result.
  const at::Tensor& target() const { return staging.defined() ? staging : reduced; }
};

// Encodes the content of a bucket, starts the collective that the bucket's layout needs, and decodes the result. Used
// by one thread at a time, with autograd off.
class BucketCollectives {
 public:
  // All arguments must outlive this object.
  BucketCollectives(const Mesh& mesh, BucketMemory& memory, const ReducerOptions& options)
      : mesh_(mesh), memory_(memory), options_(options) {}

  // Sets the number by which ReductionQueue divides sums over ranks. If empty, collectives compute averages instead.
  void set_divisor(std::optional<double> divisor) { divisor_ = divisor; }
  const std::optional<double>& divisor() const { return divisor_; }

  // Starts the reduction of the content over the ranks that share one copy of the model.
  void start(PendingReduction& reduction, const GradientBucket& plan);
  // Must be called when `pending` is complete. Leaves the result in target(): the average, or the sum if divisor() is
  // set. Frees the other tensors.
  void decode(PendingReduction& reduction, const GradientBucket& plan) const;
  // Starts averaging target() over the copies of the model, or summing it if divisor() is set.
  void start_over_copies(PendingReduction& reduction, const GradientBucket& plan) const;

 private:
  Pending all_reduce(PendingReduction& reduction, const GradientBucket& plan) const;
  Pending reduce_to_owner(PendingReduction& reduction, const GradientBucket& plan);
  Pending reduce_apart(PendingReduction& reduction, const GradientBucket& plan) const;
  Pending reduce_scatter(PendingReduction& reduction, const GradientBucket& plan);
  Pending exchange_encoded(PendingReduction& reduction, const GradientBucket& plan);
  void add_encoded(PendingReduction& reduction, const WireCodec& codec) const;
  ReduceOp op() const { return divisor_ ? ReduceOp::kSum : ReduceOp::kAverage; }

  const Mesh& mesh_;
  BucketMemory& memory_;
  const ReducerOptions& options_;
  std::optional<double> divisor_;
};

}  // namespace tessera::internal
