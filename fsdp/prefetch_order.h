#pragma once

#include <cstddef>
#include <vector>

namespace tessera::internal {

// Predicts the next units from the order of the last pass (a forward or a backward). A value: no ranks, no tensors.
class PrefetchOrder {
 public:
  // Starts a pass. The units of the one before, if any, become expected().
  void begin_pass();

  // The prediction for the first pass; each later pass is expected to repeat the one before.
  void expect(std::vector<int> order) { expected_ = std::move(order); }

  // Records a use. The same unit twice in a row counts once. A pass that does not end (evaluations that call modules
  // and not the wrapper) starts over after kLongestPass uses.
  static constexpr size_t kLongestPass = size_t{1} << 16;
  void used(int unit);

  // Removes the last uses if they repeat the two equal sequences before them. Between passes, modules that are called
  // directly would otherwise lengthen seen() without end.
  void forget_repetition();

  // The next `count` different units at this point of the last pass, nearest first. Empty if the last use is not in
  // expected().
  std::vector<int> upcoming(int count) const;

  // The uses of this pass, in order.
  const std::vector<int>& seen() const { return current_; }
  const std::vector<int>& expected() const { return expected_; }

 private:
  std::vector<int> expected_;
  std::vector<int> current_;
  size_t next_ = 0;      // the index in expected_ of the next use
  bool on_path_ = true;  // the last use is in expected_
};

}  // namespace tessera::internal
