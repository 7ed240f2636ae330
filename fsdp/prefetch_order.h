#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace tessera::internal {

// Predicts the next units from the unit order of the last pass (a forward or a backward). A value type.
class PrefetchOrder {
 public:
  // Starts a pass. If the previous pass used units, its uses become expected().
  void begin_pass() {
    if (!current_.empty()) expected_ = std::move(current_);
    current_.clear();
    next_ = 0;
    on_path_ = true;
  }

  // Sets the prediction for the first pass. Each later pass is expected to repeat the previous one.
  void expect(std::vector<int> order) { expected_ = std::move(order); }

  // Records a use. Successive uses of one unit count once. A pass may never end if an evaluation calls modules instead
  // of the wrapper. So a new pass begins after kLongestPass uses.
  static constexpr size_t kLongestPass = size_t{1} << 16;
  void used(int unit) {
    if (!current_.empty() && current_.back() == unit) return;
    if (current_.size() >= kLongestPass) begin_pass();
    current_.push_back(unit);
    // The unit is usually at next_. Otherwise the pass has skipped units or started over.
    auto found = std::find(expected_.begin() + static_cast<std::ptrdiff_t>(next_), expected_.end(), unit);
    if (found == expected_.end()) found = std::ranges::find(expected_, unit);
    on_path_ = found != expected_.end();
    if (on_path_) next_ = static_cast<size_t>(found - expected_.begin()) + 1;
  }

  // If the last uses repeat one sequence three times, removes the last repetition. So seen() stays short if the user
  // calls modules directly between passes.
  void forget_repetition() {
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

  // Predicts up to `count` different units, in the order of their next uses. Returns none before the first use of a
  // pass, or if the last use is not in expected().
  std::vector<int> upcoming(int count) const {
    std::vector<int> units;
    if (!on_path_ || current_.empty()) return units;
    for (size_t i = next_; i < expected_.size() && static_cast<int>(units.size()) < count; ++i) {
      const int unit = expected_[i];
      if (unit != current_.back() && std::ranges::find(units, unit) == units.end()) units.push_back(unit);
    }
    return units;
  }

  const std::vector<int>& seen() const { return current_; }
  const std::vector<int>& expected() const { return expected_; }

 private:
  std::vector<int> expected_;
  std::vector<int> current_;
  size_t next_ = 0;      // index in expected_ of the next expected use
  bool on_path_ = true;  // whether the last use is in expected_
};

}  // namespace tessera::internal
