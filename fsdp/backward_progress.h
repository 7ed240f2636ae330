#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace tessera::internal {

// Which buckets of units a backward pass reduces, in which order, and which units have all gradients of the pass. The
// order is the reverse of the units' first uses in forward, so that it is equal on all ranks, whatever order gradients
// arrive in. Pure: knows units and buckets by number only.
class BackwardProgress {
 public:
  // `first_buckets`: by unit, the number of its first bucket; and one past the last bucket.
  void set_buckets(std::vector<size_t> first_buckets);

  // Forward, or a part of it that backward recomputes, uses the unit with autograd recording.
  void expect(size_t unit);

  // Begins a pass, and returns the order of its buckets. Without an expected unit (a second backward of one graph) it
  // is the order of the last pass. `trains`: whether any parameter of a bucket requires a gradient.
  std::vector<size_t> begin(const std::function<bool(size_t bucket)>& trains);
  // The bucket has all gradients. A no-op for the second time in a pass.
  void complete(size_t unit, size_t bucket);
  bool is_complete(size_t unit) const { return missing_[unit] == 0; }
  // Ends the pass: the next forward begins a new order.
  void end();

 private:
  std::vector<size_t> first_buckets_;
  std::vector<size_t> uses_, last_uses_;  // units in order of first use: since the last pass, and before it
  std::vector<bool> is_expected_;         // by unit
  std::vector<int64_t> missing_;          // by unit: buckets without all gradients of this pass
  std::vector<bool> is_done_;             // by bucket
};

}  // namespace tessera::internal
