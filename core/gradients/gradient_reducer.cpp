#include "core/gradients/gradient_reducer.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include <tessera/errors.h>
#include "core/gradients/finite_check.h"

namespace tessera::internal {

namespace {

constexpr const char* kOperations[] = {"reduce-scatter", "reduce", "all-reduce"};  // indexed by FlatLayout::Cut

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
  // The memory may belong to another stream than the current one, which uses or frees it.
  std::vector<at::Tensor> memory{reduction.reduced, reduction.wire, reduction.received};
  for (const auto& part : reduction.content.parts) memory.push_back(part.values);
  const auto storage = [](const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); };
  const void* recorded = nullptr;  // parts of one buffer follow each other
  for (const at::Tensor& tensor : memory)
    if (tensor.defined() && !tensor.is_cpu() && storage(tensor) != std::exchange(recorded, storage(tensor)))
      tensor.record_stream(current_stream(tensor.device()));
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

GradientReducer::GradientReducer(const std::vector<PlannedParameter>& parameters, const Mesh& mesh, CollectiveLog& log,
                                 ReducerOptions options)
    : mesh_(mesh),
      log_(log),
      options_(options),
      memory_(mesh.world->device()),
      collector_(parameters, buckets_, memory_, {mesh.world->rank(), /*may_fill_result=*/options.to_host == nullptr}),
      queue_(parameters, buckets_, mesh, log, memory_, options_),
      consistency_check_(parameters, buckets_, mesh, log, {options.refuse_uneven_use, options.is_static}),
      used_(parameters.size(), false) {}

void GradientReducer::set_buckets(std::vector<GradientBucket> buckets) {
  buckets_ = std::move(buckets);
  for (GradientBucket& bucket : buckets_) bucket.route = route_of(bucket, mesh_, options_.zero_copy_bytes);
  collector_.rebuild();
  queue_.clear();
  consistency_check_.forget_first_pass();
  used_.assign(used_.size(), false);
}

void GradientReducer::begin(const std::vector<size_t>& order, bool frozen_too) {
  collector_.begin_pass();
  queue_.clear();
  for (const size_t bucket : order)
    if (frozen_too || collector_.trains(bucket)) queue_.enqueue(bucket);
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket)  // buckets that keep sums of earlier passes
    if (collector_.has_content(bucket)) queue_.enqueue(bucket);
}

bool GradientReducer::add(size_t parameter, const at::Tensor& gradient) {
  const size_t bucket = bucket_of(parameter);
  queue_.enqueue(bucket);
  if (gradient.defined()) place(parameter, gradient);
  collector_.note_arrival(parameter);
  return collector_.is_full(bucket);
}

void GradientReducer::place(size_t parameter, const at::Tensor& gradient) {
  const size_t bucket = bucket_of(parameter);
  const bool is_recomputed = queue_.state(bucket) == BucketState::kReduced;
  if (is_recomputed && has_observer())
    throw std::logic_error("the gradients of " + buckets_[bucket].name +
                           " come in several parts in one backward, and its step may have been taken after the first: "
                           "take the optimizer's step after backward instead");
  collector_.place(parameter, gradient, is_recomputed);
}

void GradientReducer::start_full_ones() {
  for (auto bucket = queue_.next(); bucket && collector_.is_full(*bucket); bucket = queue_.next())
    queue_.reduce(*bucket, collector_.take(*bucket));
}

// ---- the end of a pass --------------------------------------------------------------------------

void GradientReducer::finish() {
  while (const auto bucket = queue_.next()) queue_.reduce(*bucket, collector_.take(*bucket));
  const PassUse use = exchange_use();
  used_ = use.used;
  log_.clear();
  queue_.accept_waiting(used_);
  reduce_recomputed(use.recomputed);
  const std::vector<bool> reduced = queue_.reduced();
  clear_pass();
  if (options_.check_finite) require_finite(buckets_, reduced, *mesh_.world);
}

// Finds the parameters that any rank used, while the last reductions are in flight.
PassUse GradientReducer::exchange_use() {
  try {
    return consistency_check_.exchange(collector_.use(), [this] {
      queue_.drain();
      return queue_.has_waiting();
    });
  } catch (const CommError&) {
    throw;
  } catch (...) {
    log_.clear();
    clear_pass();
    throw;
  }
}

void GradientReducer::reduce_recomputed(const std::vector<bool>& recomputed) {
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    if (!recomputed[bucket]) continue;
    queue_.reduce(bucket, collector_.take_recomputed(bucket));
    queue_.drain();
    queue_.accept_waiting(used_);
  }
}

void GradientReducer::end_without_reducing() {
  collector_.keep_for_next_pass();
  queue_.clear();
}

void GradientReducer::abandon() {
  queue_.discard();
  log_.clear();
  collector_.forget_all();
  queue_.clear();
  used_.assign(used_.size(), false);
}

void GradientReducer::clear_pass() {
  queue_.clear();
  collector_.forget_recomputed();
}

void GradientReducer::report(MemoryReport& report) const {
  report.bucket_bytes = memory_.bytes();
  report.peak_bucket_bytes = memory_.peak_bytes();
}

}  // namespace tessera::internal
