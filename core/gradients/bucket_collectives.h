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
  bool refuse_uneven_use = false;  // see FsdpOptions
  bool check_finite = false;
  bool backend_all_reduce = false;  // see DdpOptions
  bool is_static = false;           // every pass has gradients for the same parameters: only the first is exchanged
  size_t in_flight = 2;             // reductions in flight: one is sent while the next bucket fills
  size_t max_lazy_in_flight = 2;    // if they progress only in wait(): a rank can be ahead of its peers by as many
  // A gradient of at least this many bytes may be reduced from autograd's memory. Copying a smaller one into its bucket
  // costs less than one more message.
  int64_t zero_copy_bytes = int64_t{256} << 10;
  // Copies reduced gradients to the host. Null if they stay on the device.
  CopyEngine* to_host = nullptr;
  CountedBuffers* staging = nullptr;
};

// The reduction in flight of a bucket's content.
struct PendingReduction {
  size_t bucket;
  BucketContent content;
  at::Tensor wire{};      // the encoded bytes that this rank sends
  at::Tensor received{};  // encoded parts of all ranks
  at::Tensor reduced{};   // this rank's part; undefined if it gets none
  at::Tensor staging{};   // on the device, for a result that is copied to the host
  Pending pending{};
  Copy copy{};
  // The memory on the device that the collectives write to.
  const at::Tensor& target() const { return staging.defined() ? staging : reduced; }
};

// Encodes the content of a bucket, starts the collective that its layout needs, and decodes the result. Used by one
// thread at a time, with autograd off.
class BucketCollectives {
 public:
  // All of these must outlive the object.
  BucketCollectives(const Mesh& mesh, BucketMemory& memory, const ReducerOptions& options)
      : mesh_(mesh), memory_(memory), options_(options) {}

  // Sets the divisor of sums over ranks; empty: the number of ranks.
  void set_divisor(std::optional<double> divisor) { divisor_ = divisor; }
  const std::optional<double>& divisor() const { return divisor_; }

  // Starts to reduce over the ranks of a copy.
  void start(PendingReduction& reduction, const GradientBucket& plan);
  // After the collective: leaves the average, or the sum if there is a divisor, and frees all other memory.
  void decode(PendingReduction& reduction, const GradientBucket& plan) const;
  // Starts to average the result over the copies of the model.
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
