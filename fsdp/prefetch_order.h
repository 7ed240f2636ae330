#pragma once

#include <cstddef>
#include <vector>

namespace tessera::internal {

// Foretells which units come next, from the order in which they came in the last pass: a forward or a backward. Pure.
class PrefetchOrder {
 public:
  // Ends the pass under way, if any unit was used in it, and starts the next.
  void begin_pass();

  // What to expect of the first pass; later ones are expected to repeat the one before.
  void expect(std::vector<int> order) { expected_ = std::move(order); }

  // A unit came into use. The same unit twice in a row counts once. A pass that nobody ends (evaluations that do not
  // go through the wrapper) starts over after so many uses.
  static constexpr size_t kLongestPass = size_t{1} << 16;
  void used(int unit);

  // The next `count` different units that followed at this point of the last pass, nearest first. Empty if this pass
  // has left the path of the last one.
  std::vector<int> upcoming(int count) const;

  // Units in order of first use in the pass under way.
  const std::vector<int>& seen() const { return current_; }
  const std::vector<int>& expected() const { return expected_; }

 private:
  std::vector<int> expected_;
  std::vector<int> current_;
  size_t next_ = 0;      // in expected_: what should come now
  bool on_path_ = true;  // the last unit used was where expected_ has it
};

}  // namespace tessera::internal
