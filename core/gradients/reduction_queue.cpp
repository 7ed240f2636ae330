#include "core/gradients/reduction_queue.h"

#include <algorithm>
#include <utility>

namespace tessera::internal {
namespace {

constexpr const char* kOperations[] = {"reduce-scatter", "reduce", "all-reduce"};  // by FlatLayout::Cut

}  // namespace

// ---- order --------------------------------------------------------------------------------------

void ReductionQueue::clear() {
  stages_[kWaiting].clear();
  order_.clear();
  states_.assign(buckets_.size(), BucketState::kIdle);
}

void ReductionQueue::enqueue(size_t bucket) {
  if (states_[bucket] != BucketState::kIdle) return;
  states_[bucket] = BucketState::kQueued;
  order_.push_back(bucket);
}

std::vector<bool> ReductionQueue::reduced() const {
  std::vector<bool> reduced;
  for (const BucketState state : states_) reduced.push_back(state == BucketState::kReduced);
  return reduced;
}

// ---- start --------------------------------------------------------------------------------------

void ReductionQueue::reduce(size_t bucket, BucketContent content) {
  const GradientBucket& plan = buckets_[bucket];
  if (next() == bucket) order_.pop_front();
  states_[bucket] = BucketState::kReduced;
  log_.add(kOperations[static_cast<size_t>(plan.layout.cut())], plan.name, plan.layout.full_numel(), divisor());
  PendingReduction reduction{bucket, std::move(content)};
  collectives_.start(reduction, plan);
  push(kReducing, std::move(reduction), most_in_flight(plan));
}

size_t ReductionQueue::most_in_flight(const GradientBucket& bucket) const {
  const bool is_lazy = mesh_.shard->is_lazy(bucket.layout.full_numel());
  return is_lazy ? std::min(options_.max_lazy_in_flight, options_.in_flight) : options_.in_flight;
}

// ---- stages -------------------------------------------------------------------------------------

void ReductionQueue::push(Stage stage, PendingReduction reduction, size_t most_in_flight) {
  stages_[stage].push_back(std::move(reduction));
  while (stages_[stage].size() > most_in_flight) finish_oldest(stage);
}

PendingReduction ReductionQueue::pop(Stage stage) {
  PendingReduction reduction = std::move(stages_[stage].front());
  stages_[stage].pop_front();
  return reduction;
}

void ReductionQueue::finish_oldest(Stage stage) {
  PendingReduction reduction = pop(stage);
  if (stage == kToHost) {
    reduction.copy.wait_on_host();
    reduction.staging.reset();
    return accept_or_wait(std::move(reduction));
  }
  wait(reduction);
  reduction.content.require_as_borrowed(buckets_[reduction.bucket], parameters_, mesh_.world->rank());
  if (!reduction.reduced.defined()) return;
  if (stage == kAcrossCopies) return divide_and_move(std::move(reduction));
  const GradientBucket& plan = buckets_[reduction.bucket];
  collectives_.decode(reduction, plan);
  if (!mesh_.replicas) return divide_and_move(std::move(reduction));
  collectives_.start_over_copies(reduction, plan);
  push(kAcrossCopies, std::move(reduction), options_.in_flight);
}

void ReductionQueue::drain() {
  for (const Stage stage : {kReducing, kAcrossCopies, kToHost})
    while (!stages_[stage].empty()) finish_oldest(stage);
}

void ReductionQueue::discard() {
  for (const Stage stage : {kReducing, kAcrossCopies})
    while (!stages_[stage].empty()) {
      PendingReduction reduction = pop(stage);
      wait(reduction);
    }
  for (auto& stage : stages_) stage.clear();
}

void ReductionQueue::wait(PendingReduction& reduction) {
  reduction.pending.wait();
  memory_.count_borrowed(-reduction.content.borrowed_bytes());
  for (const auto& part : reduction.content.parts)  // whose stream need not be the current one
    if (part.memory == BucketContent::Memory::kBorrowed && !part.values.is_cpu())
      part.values.record_stream(current_stream(part.values.device()));
}

void ReductionQueue::divide_and_move(PendingReduction reduction) {
  if (divisor()) reduction.target().div_(*divisor());
  if (!reduction.staging.defined()) return accept_or_wait(std::move(reduction));
  reduction.copy = options_.to_host->to_host(reduction.reduced, reduction.staging);
  push(kToHost, std::move(reduction), options_.in_flight);
}

// ---- results ------------------------------------------------------------------------------------

void ReductionQueue::accept_or_wait(PendingReduction reduction) {
  const std::vector<bool>& filled = reduction.content.filled;
  const bool is_filled = std::ranges::all_of(filled, [](bool member) { return member; });
  const bool must_follow = std::ranges::any_of(
      stages_[kWaiting], [&](const PendingReduction& other) { return other.bucket == reduction.bucket; });
  if (!is_filled || must_follow) return stages_[kWaiting].push_back(std::move(reduction));
  accept(reduction, filled);
}

void ReductionQueue::accept_waiting(const std::vector<bool>& used) {
  for (const PendingReduction& reduction : std::exchange(stages_[kWaiting], {})) {
    std::vector<bool> used_members;
    for (const size_t parameter : buckets_[reduction.bucket].members) used_members.push_back(used[parameter]);
    accept(reduction, used_members);
  }
}

void ReductionQueue::accept(const PendingReduction& reduction, const std::vector<bool>& used) const {
  GradientBuffer& result = *buckets_[reduction.bucket].result;
  result.accept(reduction.reduced, used);
  if (!observer_) return;
  if (const std::vector<at::Tensor> leaves = result.leaves(used); !leaves.empty()) observer_(leaves);
}

}  // namespace tessera::internal
