#include "core/gradients/gradient_reducer.h"

#include <stdexcept>
#include <utility>

#include <tessera/errors.h>
#include "core/gradients/finite_check.h"

namespace tessera::internal {

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
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket)  // sums of earlier passes
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

// Exchanges the ranks' use while the last reductions are in flight.
PassUse GradientReducer::exchange_use() {
  try {
    return consistency_check_.exchange(collector_.use(), [this] {
      queue_.drain();
      return queue_.has_waiting();
    });
  } catch (const CommError&) {
    throw;
  } catch (const std::exception&) {
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
