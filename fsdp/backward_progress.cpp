#include "fsdp/backward_progress.h"

#include <algorithm>
#include <utility>

namespace tessera::internal {

void BackwardProgress::set_buckets(std::vector<size_t> first_buckets) {
  first_buckets_ = std::move(first_buckets);
  is_expected_.assign(first_buckets_.size() - 1, false);
  missing_.assign(first_buckets_.size() - 1, 0);
  is_done_.assign(first_buckets_.back(), false);
}

void BackwardProgress::expect(size_t unit) {
  if (is_expected_[unit]) return;
  is_expected_[unit] = true;
  uses_.push_back(unit);
}

std::vector<size_t> BackwardProgress::begin(const std::function<bool(size_t bucket)>& trains) {
  for (size_t unit = 0; unit < missing_.size(); ++unit) {
    missing_[unit] = 0;
    for (size_t bucket = first_buckets_[unit]; bucket < first_buckets_[unit + 1]; ++bucket) {
      is_done_[bucket] = !trains(bucket);
      if (!is_done_[bucket]) ++missing_[unit];
    }
  }
  if (!uses_.empty()) last_uses_ = uses_;
  std::vector<size_t> order;
  for (auto unit = last_uses_.rbegin(); unit != last_uses_.rend(); ++unit)
    for (size_t bucket = first_buckets_[*unit]; bucket < first_buckets_[*unit + 1]; ++bucket) order.push_back(bucket);
  return order;
}

void BackwardProgress::complete(size_t unit, size_t bucket) {
  if (is_done_[bucket]) return;
  is_done_[bucket] = true;
  --missing_[unit];
}

void BackwardProgress::end() {
  uses_.clear();
  std::fill(is_expected_.begin(), is_expected_.end(), false);
}

}  // namespace tessera::internal
