#include "fsdp/prefetch_order.h"

#include <algorithm>

namespace tessera::internal {

void PrefetchOrder::begin_pass() {
  if (!current_.empty()) expected_ = std::move(current_);
  current_.clear();
  next_ = 0;
  on_path_ = true;
}

void PrefetchOrder::used(int unit) {
  if (!current_.empty() && current_.back() == unit) return;
  if (current_.size() >= kLongestPass) begin_pass();
  current_.push_back(unit);
  // Usually at next_. Otherwise the pass skipped units, or started over.
  auto found = std::find(expected_.begin() + static_cast<std::ptrdiff_t>(next_), expected_.end(), unit);
  if (found == expected_.end()) found = std::find(expected_.begin(), expected_.end(), unit);
  on_path_ = found != expected_.end();
  if (on_path_) next_ = static_cast<size_t>(found - expected_.begin()) + 1;
}

void PrefetchOrder::forget_repetition() {
  const size_t count = current_.size();
  for (size_t period = 1; 3 * period <= count; ++period) {
    if (current_[count - 1] != current_[count - 1 - period]) continue;
    if (!std::equal(current_.end() - static_cast<std::ptrdiff_t>(2 * period), current_.end(),
                    current_.end() - static_cast<std::ptrdiff_t>(3 * period)))
      continue;
    current_.resize(count - period);
    return;
  }
}

std::vector<int> PrefetchOrder::upcoming(int count) const {
  std::vector<int> units;
  if (!on_path_ || current_.empty()) return units;
  for (size_t i = next_; i < expected_.size() && static_cast<int>(units.size()) < count; ++i) {
    const int unit = expected_[i];
    if (unit != current_.back() && std::find(units.begin(), units.end(), unit) == units.end()) units.push_back(unit);
  }
  return units;
}

}  // namespace tessera::internal
