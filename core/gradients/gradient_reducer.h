#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <tessera/communicator.h>
#include <tessera/model/data_parallel.h>
#include "core/gradients/bucket_content.h"
#include "core/gradients/gradient_bucket.h"
#include "core/gradients/order_log.h"
#include "core/gradients/pass_reports.h"
#include "core/gradients/reducer_options.h"
#include "core/layout/mesh.h"
#include "core/layout/unit_plan.h"
#include "core/memory/counted_buffers.h"

namespace tessera::internal {

// The queue of gradients, the same under every wrapper: gradients arrive -> buckets -> one order on all ranks ->
// stages (reduced; averaged with the other copies of the model; on the way to the host) -> marks of use -> accepted.
//
// A full bucket waits for those that were expected before it; what is not full when backward ends (parameters that
// this rank did not use) is filled with zeros. Then the ranks tell each other, in one small all-reduce, which
// parameters had a gradient at all, so that those without one anywhere keep what they had, and which buckets got more
// after they had been sent (a part of the model computed again within backward), which are then reduced once more:
// PassReports.
//
// Under no_sync buckets keep what they have for a later pass. Used by one thread at a time, under no autograd.
class GradientReducer {
 public:
  // The list, the mesh and the log outlive it.
  GradientReducer(const std::vector<PlannedParameter>& parameters, const Mesh& mesh, OrderLog& log,
                  ReducerOptions options);

  // Between passes, with nothing kept. A parameter is in one bucket at most.
  void set_buckets(std::vector<GradientBucket> buckets);
  const std::vector<GradientBucket>& buckets() const { return buckets_; }
  // What sums over ranks are divided by; empty: the number of ranks.
  void set_divisor(std::optional<double> divisor) { divisor_ = divisor; }
  const std::optional<double>& divisor() const { return divisor_; }

  // Starts a pass whose reductions begin in this order of buckets; others follow as they come. `frozen_too`: also
  // those of `order` in which nothing is trained, for what add_kept() may bring on some ranks.
  void begin(const std::vector<size_t>& order, bool frozen_too = false);
  // A parameter's gradient, of any layout; undefined means none. Returns whether its bucket has all of this pass.
  bool add(size_t parameter, const at::Tensor& gradient);
  // Begins to reduce the buckets that have all; not in a pass that leaves them for a later one. Memory that the
  // reduction does not need is best freed before.
  void start_full_ones();
  // What earlier passes left elsewhere, after begin(); does not count as this pass's. `sum` is the bucket's from now
  // on.
  void add_kept(size_t parameter, const at::Tensor& sum) { collect(parameter, sum); }
  // Ends the pass: each result has its gradient. Collective. Throws CommError; std::invalid_argument, on all ranks, if
  // the ranks reduced differently, and what the checks find.
  void finish();
  // Ends a pass that does not reduce.
  void end_without_reducing();
  // Ends a pass that failed: waits for what is under way, and forgets all gradients.
  void abandon();

  size_t bucket_of(size_t parameter) const { return states_[parameter].bucket; }
  // Whether a bucket keeps a gradient of the parameter, and to forget it.
  bool keeps(size_t parameter) const;
  void forget(size_t parameter);
  // Parameters in the order in which their gradients came in the last pass.
  const std::vector<size_t>& arrivals() const { return arrivals_; }
  // Whether any rank had a gradient of it in the last pass that reduced.
  bool was_used(size_t parameter) const { return used_[parameter]; }

  // Called with leaves whose gradients have become final; see GradientSource. Not while a pass goes on.
  using Observer = std::function<void(const std::vector<at::Tensor>& leaves)>;
  void set_observer(Observer observer) { observer_ = std::move(observer); }
  bool has_observer() const { return observer_ != nullptr; }

  int64_t bucket_bytes() const { return buffers_.lent_bytes() + borrowed_bytes_; }
  void report(MemoryReport& report) const;
  void reset_peak() { peak_bytes_ = bucket_bytes(); }

 private:
  static constexpr size_t kNowhere = static_cast<size_t>(-1);
  struct ParameterState {
    size_t bucket = kNowhere, member = 0;
    bool arrived = false;  // in this pass
  };
  struct BucketState {
    BucketContent content;
    size_t missing = 0;  // gradients to come in this pass
    bool queued = false, started = false;
    BucketContent late;  // what came after that was sent
  };
  enum Stage : size_t { kReducing, kCrossing, kLeaving, kStages };
  struct Flight {
    size_t bucket;
    BucketContent content;
    at::Tensor wire;     // what travels
    at::Tensor encoded;  // in blocks: what has come, a part of each rank
    at::Tensor reduced;  // this rank's part, for the result; undefined if it gets none
    at::Tensor staging;  // on the device, of what leaves it
    Pending pending;
    Copy leaving;
  };

  void collect(size_t parameter, const at::Tensor& gradient);
  void collect(BucketContent& content, size_t bucket, size_t member, const at::Tensor& gradient);
  void copy_waiting(BucketContent& content, size_t bucket) const;
  void cut(GradientBucket& bucket) const;
  void make_room(BucketContent& content, size_t bucket, size_t piece);
  void own(BucketContent& content, size_t bucket, size_t piece);
  static at::Tensor as_it_is(const GradientBucket& plan, size_t member, const at::Tensor& gradient);
  void start(size_t bucket);
  size_t most_in_flight(const GradientBucket& bucket) const;
  Pending reduce(Flight& flight);
  bool is_large(const GradientBucket& bucket) const;
  bool reduces_apart(const GradientBucket& bucket) const;
  bool adopts(const GradientBucket& bucket) const;
  void adopt(BucketContent& content, const GradientBucket& plan);
  Pending reduce_apart(Flight& flight, ReduceOp op);
  bool is_encoded(const GradientBucket& bucket) const;
  Pending exchange_encoded(Flight& flight);
  void add_encoded(Flight& flight);
  void finish_oldest(Stage stage, bool accept = true);
  void drain(bool accept = true);
  void pass_on(Flight flight);
  void accept(Flight flight);
  void hand_over(const Flight& flight, const std::vector<bool>& used);
  void observe(size_t bucket, const std::vector<bool>& used) const;
  bool is_busy(size_t bucket) const;
  void reset();
  void note_bytes();
  std::vector<bool> used_in(size_t bucket) const;

  const std::vector<PlannedParameter>& parameters_;
  const Mesh& mesh_;
  OrderLog& log_;
  const ReducerOptions options_;
  CountedBuffers buffers_;
  std::optional<double> divisor_;
  std::vector<GradientBucket> buckets_;
  std::vector<ParameterState> states_;  // by parameter
  std::vector<bool> used_;  // by parameter: a gradient in this pass, or one that is kept; at the end of it: on any rank
  PassReports reports_;
  std::vector<BucketState> contents_;                // by bucket
  std::vector<size_t> queue_;                        // buckets in the order in which they are reduced
  size_t started_ = 0;                               // how many of them are
  std::array<std::deque<Flight>, kStages> flights_;  // oldest first
  std::vector<Flight> undecided_;                    // reduced, but perhaps some parameter was used by no rank
  std::vector<bool> reduced_;                        // by bucket: in this pass
  std::vector<size_t> arrivals_;
  Observer observer_;
  int64_t borrowed_bytes_ = 0, peak_bytes_ = 0;  // of gradients that travel without being copied; the most of all
};

}  // namespace tessera::internal
