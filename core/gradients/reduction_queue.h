#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <vector>

#include "core/gradients/bucket_collectives.h"
#include "core/gradients/bucket_content.h"
#include "core/gradients/bucket_memory.h"
#include "core/gradients/collective_log.h"
#include "core/gradients/gradient_bucket.h"
#include "core/gradients/reducer_options.h"
#include "core/layout/mesh.h"
#include "core/layout/unit_plan.h"

namespace tessera::internal {

// A bucket in a pass.
enum class BucketState : uint8_t {
  kIdle,     // has no turn yet
  kQueued,   // has a turn
  kReduced,  // its reduction has begun; more gradients need a second one
};

// Reduces the contents of buckets in one order on all ranks. Each reduction goes through these stages, in each of which
// a limited number may be in flight:
//
//   encode -> reduce over the ranks of a copy -> average over the copies -> copy to the host -> accept
//
// A result becomes `.grad` at once if this rank has a gradient for each member. If not, it waits for accept_waiting(),
// since no rank may have used some member. Used by one thread at a time, under no autograd.
class ReductionQueue {
 public:
  // All of these must outlive the queue.
  ReductionQueue(const std::vector<PlannedParameter>& parameters, const std::vector<GradientBucket>& buckets,
                 const Mesh& mesh, CollectiveLog& log, BucketMemory& memory, const ReducerOptions& options)
      : parameters_(parameters),
        buckets_(buckets),
        mesh_(mesh),
        log_(log),
        memory_(memory),
        options_(options),
        collectives_(mesh, memory, options) {}

  // See BucketCollectives.
  void set_divisor(std::optional<double> divisor) { collectives_.set_divisor(divisor); }
  const std::optional<double>& divisor() const { return collectives_.divisor(); }
  // Called with leaves whose gradients have become final.
  using Observer = std::function<void(const std::vector<at::Tensor>& leaves)>;
  void set_observer(Observer observer) { observer_ = std::move(observer); }
  bool has_observer() const { return observer_ != nullptr; }

  // Forgets the order of buckets, their states and results that wait.
  void clear();
  // Gives a bucket the last turn, unless it has one.
  void enqueue(size_t bucket);
  BucketState state(size_t bucket) const { return states_[bucket]; }
  std::vector<bool> reduced() const;  // by bucket
  // The bucket whose turn it is; empty if all have been reduced.
  std::optional<size_t> next() const { return order_.empty() ? std::nullopt : std::optional(order_.front()); }

  // Starts reducing the content of a bucket, whose turn ends. Blocks while too many reductions are in flight.
  void reduce(size_t bucket, BucketContent content);
  // Blocks until every reduction is accepted or waits for accept_waiting().
  void drain();
  // Blocks until no reduction is in flight. Forgets all results.
  void discard();

  bool has_waiting() const { return !stages_[kWaiting].empty(); }
  // Accepts the waiting results. `used`: by parameter, whether any rank has a gradient.
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
  std::deque<size_t> order_;                                  // buckets whose turn is yet to come
  std::vector<BucketState> states_;                           // by bucket
  std::array<std::deque<PendingReduction>, kStages> stages_;  // oldest first
};

}  // namespace tessera::internal
