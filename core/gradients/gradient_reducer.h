#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <vector>

#include <tessera/model/data_parallel.h>
#include "core/gradients/backward_consistency_check.h"
#include "core/gradients/bucket_collectives.h"
#include "core/gradients/bucket_content.h"
#include "core/gradients/collective_log.h"
#include "core/gradients/gradient_bucket.h"
#include "core/layout/mesh.h"
#include "core/layout/unit_plan.h"

namespace tessera::internal {

// Places the gradients of a pass in buckets, and counts the missing gradients of each bucket. Does not communicate:
// ReductionQueue reduces the contents. Used by one thread at a time, with autograd off.
class GradientCollector {
 public:
  struct Options {
    int rank = 0;                 // for errors
    bool may_fill_result = true;  // whether gradients may be placed in the result's memory
  };
  // The lists and the memory must outlive the collector.
  GradientCollector(const std::vector<PlannedParameter>& parameters, const std::vector<GradientBucket>& buckets,
                    BucketMemory& memory, Options options);

  // Must be called after the list of buckets was replaced. Drops all gradients.
  void rebuild();
  void begin_pass();

  bool trains(size_t bucket) const { return slots_[bucket].expected > 0; }  // whether a member requires a gradient
  bool is_full(size_t bucket) const { return slots_[bucket].missing == 0; }
  bool has_content(size_t bucket) const { return slots_[bucket].content.is_begun(); }
  size_t bucket_of(size_t parameter) const { return places_[parameter].bucket; }

  // Places a gradient of any layout. `is_recomputed` must be true if the reduction of the parameter's bucket has begun,
  // for example because backward recomputes a part of the model.
  void place(size_t parameter, const at::Tensor& gradient, bool is_recomputed);
  // Must be called when a parameter's gradient was placed or is absent. When all trained members have arrived, the
  // bucket is full.
  void note_arrival(size_t parameter);

  // Removes and returns the content of a bucket, with zeros for absent gradients.
  BucketContent take(size_t bucket);
  BucketContent take_recomputed(size_t bucket);
  // Copies gradients that belong to autograd, so that the next pass can add to them.
  void keep_for_next_pass();

  // Whether a bucket has a gradient of the parameter. forget() removes that gradient.
  bool keeps(size_t parameter) const;
  void forget(size_t parameter);
  void forget_recomputed();
  void forget_all();

  // Returns this rank's use in the pass: parameters with a gradient, and buckets with recomputed gradients.
  PassUse use() const;
  // Returns the parameters in the order in which their gradients arrived.
  const std::vector<size_t>& arrivals() const { return arrivals_; }

 private:
  static constexpr size_t kNowhere = static_cast<size_t>(-1);
  struct Place {
    size_t bucket = kNowhere, member = 0;
    bool has_arrived = false;
  };
  struct Slot {
    BucketContent content, recomputed;
    size_t expected = 0, missing = 0;  // the number of gradients in this pass, and of those that have not arrived
  };

  void collect(BucketContent& content, size_t bucket, size_t member, const at::Tensor& gradient);
  void make_room(BucketContent& content, size_t bucket, size_t piece);
  void copy_borrowed(BucketContent& content, size_t bucket, size_t piece);
  void copy_waiting(BucketContent& content, size_t bucket) const;
  void adopt(BucketContent& content, size_t bucket);
  BucketContent sealed(BucketContent content, size_t bucket);

  const std::vector<PlannedParameter>& parameters_;
  const std::vector<GradientBucket>& buckets_;
  BucketMemory& memory_;
  const Options options_;
  std::vector<Place> places_;  // by parameter: its bucket, and its index in the bucket
  std::vector<Slot> slots_;    // by bucket: its contents
  std::vector<bool> used_;     // by parameter: whether it has a gradient in this pass
  std::vector<size_t> arrivals_;
};

enum class BucketState : uint8_t {
  kIdle,     // not in the order yet
  kQueued,   // waits for its turn in the order
  kReduced,  // its reduction has begun; later gradients need a second reduction
};

// Reduces the contents of buckets in the same order on all ranks. Each reduction passes through the following stages,
// and each stage limits its number of reductions in flight:
//
//   encode -> reduce over the ranks of a copy -> average over the copies -> copy to the host -> accept
//
// If this rank has all members' gradients, the result becomes `.grad`. Otherwise the result waits for accept_waiting(),
// because a member that has a gradient on no rank keeps its `.grad`. Used by one thread at a time, with autograd off.
class ReductionQueue {
 public:
  // All arguments must outlive the queue.
  ReductionQueue(const std::vector<PlannedParameter>& parameters, const std::vector<GradientBucket>& buckets,
                 const Mesh& mesh, CollectiveLog& log, BucketMemory& memory, const ReducerOptions& options)
      : parameters_(parameters),
        buckets_(buckets),
        mesh_(mesh),
        log_(log),
        memory_(memory),
        options_(options),
        collectives_(mesh, memory, options) {}

  void set_divisor(std::optional<double> divisor) { collectives_.set_divisor(divisor); }  // see BucketCollectives
  const std::optional<double>& divisor() const { return collectives_.divisor(); }
  // A callback that receives the leaves of a bucket when their gradients are final.
  using Observer = std::function<void(const std::vector<at::Tensor>& leaves)>;
  void set_observer(Observer observer) { observer_ = std::move(observer); }
  bool has_observer() const { return observer_ != nullptr; }

  // Clears the order of buckets, their states and waiting results.
  void clear();
  // Appends a bucket to the order, unless it is in the order or was reduced.
  void enqueue(size_t bucket);
  BucketState state(size_t bucket) const { return states_[bucket]; }
  std::vector<bool> reduced() const;  // by bucket: whether its reduction has begun in this pass
  // Returns the next bucket in the order; nullopt if all have been reduced.
  std::optional<size_t> next() const { return order_.empty() ? std::nullopt : std::optional(order_.front()); }

  // Starts reducing a bucket's content. If the bucket is next in the order, removes it from the order. Blocks while too
  // many reductions are in flight.
  void reduce(size_t bucket, BucketContent content);
  // Blocks until every reduction is accepted or waits for accept_waiting().
  void drain();
  // Blocks until no reduction is in flight. Drops all results, also those that are being copied to the host.
  void discard();

  bool has_waiting() const { return !stages_[kWaiting].empty(); }
  // Makes the waiting results `.grad`. `used` has a flag for each parameter: whether any rank has a gradient of it.
  void accept_waiting(const std::vector<bool>& used);

 private:
  enum Stage : size_t { kReducing, kAcrossCopies, kToHost, kWaiting, kStages };
  size_t most_in_flight(const GradientBucket& bucket) const;
  void push(Stage stage, PendingReduction reduction, size_t most_in_flight);
  PendingReduction pop(Stage stage);
  void finish_oldest(Stage stage);
  void wait(PendingReduction& reduction);
  void divide_and_move(PendingReduction reduction);
  void accept_or_wait(PendingReduction reduction);
  void accept(const PendingReduction& reduction, const std::vector<bool>& used) const;

  const std::vector<PlannedParameter>& parameters_;
  const std::vector<GradientBucket>& buckets_;
  const Mesh& mesh_;
  CollectiveLog& log_;
  BucketMemory& memory_;
  const ReducerOptions& options_;
  BucketCollectives collectives_;
  Observer observer_;
  std::deque<size_t> order_;                                  // buckets that wait for their turn
  std::vector<BucketState> states_;                           // by bucket
  std::array<std::deque<PendingReduction>, kStages> stages_;  // by stage; oldest first
};

// Averages gradients over ranks, bucket by bucket, while backward runs. Every wrapper uses this class.
//
//   gradients -> GradientCollector -> full buckets -> ReductionQueue -> GradientBuffer -> .grad
//
// A full bucket waits for the buckets before it in the pass's order. At the end of backward, absent gradients of this
// rank count as zero. Then one small all-reduce (BackwardConsistencyCheck) finds parameters that have a gradient on no
// rank; these parameters keep their `.grad`. The all-reduce also finds buckets that received gradients after their
// reduction began, because backward recomputed a part of the model. Such gradients are reduced at the end.
//
// Under no_sync() buckets keep their sums for a later pass. Used by one thread at a time, with autograd off.
class GradientReducer {
 public:
  // `parameters`, `mesh` and `log` must outlive the reducer.
  GradientReducer(const std::vector<PlannedParameter>& parameters, const Mesh& mesh, CollectiveLog& log,
                  ReducerOptions options);
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  // Must be called between passes, while no bucket keeps sums. A parameter is a member of at most one bucket.
  void set_buckets(std::vector<GradientBucket> buckets);
  const std::vector<GradientBucket>& buckets() const { return buckets_; }
  void set_divisor(std::optional<double> divisor) { queue_.set_divisor(divisor); }  // see BucketCollectives
  const std::optional<double>& divisor() const { return queue_.divisor(); }

  // Begins a pass. It reduces the buckets in `order`, then those with sums of earlier passes, then others in the order
  // of their first gradients. Skips buckets in `order` without trained members, unless `frozen_too` is true. It must be
  // true if any rank may call add_kept() for such a bucket.
  void begin(const std::vector<size_t>& order, bool frozen_too = false);
  // Adds a parameter's gradient, of any layout. An undefined one adds nothing, but counts as an arrival. Returns
  // whether the bucket is full now. Throws std::logic_error if an observer has seen the bucket reduced.
  bool add(size_t parameter, const at::Tensor& gradient);
  // Starts reducing full buckets, up to the first bucket in the order that is not full. Must not be called in a pass
  // that does not reduce. The caller should first free memory that buckets may reuse.
  void start_full_ones();
  // Adds a parameter's sum of earlier passes. The reducer may keep a reference to `sum`. Must be called after begin().
  // Does not count as an arrival: the bucket still waits for add() or the end of the pass.
  void add_kept(size_t parameter, const at::Tensor& sum) { place(parameter, sum); }
  // Ends the pass, and adds each result to `.grad`. Collective. Throws CommError; std::invalid_argument on all ranks if
  // their reductions differ; and the errors of BackwardConsistencyCheck and require_finite().
  void finish();
  void end_without_reducing();
  // Ends a pass that failed. Blocks until no reduction is in flight, and drops all gradients.
  void abandon();

  size_t bucket_of(size_t parameter) const { return collector_.bucket_of(parameter); }
  // Whether a bucket keeps a gradient of the parameter. forget() removes that gradient.
  bool keeps(size_t parameter) const { return collector_.keeps(parameter); }
  void forget(size_t parameter) { collector_.forget(parameter); }
  // Returns the parameters in the order in which their gradients arrived in the last pass.
  const std::vector<size_t>& arrivals() const { return collector_.arrivals(); }
  // Whether any rank had the parameter's gradient in the last reducing pass. On a device, may state only whether this
  // rank had it: see BackwardConsistencyCheck::exchange().
  bool was_used(size_t parameter) const { return used_[parameter]; }

  // Sets the callback for final gradients; see GradientSource. Must not be called during a pass.
  using Observer = ReductionQueue::Observer;
  void set_observer(Observer observer) { queue_.set_observer(std::move(observer)); }
  bool has_observer() const { return queue_.has_observer(); }

  void report(MemoryReport& report) const;
  void reset_peak() { memory_.reset_peak(); }

 private:
  void place(size_t parameter, const at::Tensor& gradient);
  PassUse exchange_use();
  void reduce_recomputed(const std::vector<bool>& recomputed);
  void clear_pass();

  const Mesh& mesh_;
  CollectiveLog& log_;
  const ReducerOptions options_;
  std::vector<GradientBucket> buckets_;
  BucketMemory memory_;
  GradientCollector collector_;
  ReductionQueue queue_;
  BackwardConsistencyCheck consistency_check_;
  std::vector<bool> used_;  // by parameter: whether any rank had a gradient in the last pass that reduced
};

}  // namespace tessera::internal
