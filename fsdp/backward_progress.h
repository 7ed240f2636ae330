#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace tessera::internal {

// Decides the order in which a backward pass reduces the buckets of units. Tracks the buckets that lack gradients. The
// order is the reverse of the units' first uses in forward. So it is equal on all ranks, even if gradients arrive in
// another order. A value type: units and buckets are numbers.
class BackwardProgress {
 public:
  // `first_buckets` has the index of each unit's first bucket; its last entry is the number of all buckets.
  void set_buckets(std::vector<size_t> first_buckets);

  // Must be called when forward uses the unit while autograd records, or in a part that backward will recompute.
  void expect(size_t unit);

  // Begins a pass, and returns the order of its buckets. If no unit was expected since the last pass (a second backward
  // of one graph), repeats the last pass's order. `trains`: whether any parameter of a bucket requires a gradient.
  std::vector<size_t> begin(const std::function<bool(size_t bucket)>& trains);
  // Records that the bucket has all its gradients. A second call in a pass is a no-op.
  void complete(size_t unit, size_t bucket);
  bool is_complete(size_t unit) const { return missing_[unit] == 0; }
  // Ends the pass. The next forward starts a new order.
  void end();

 private:
  std::vector<size_t> first_buckets_;
  std::vector<size_t> uses_, last_uses_;  // units in order of first use: for the next pass, and for the last one
  std::vector<bool> is_expected_;         // by unit: whether it is in `uses_`
  std::vector<int64_t> missing_;          // by unit: number of buckets that lack gradients of this pass
  std::vector<bool> is_done_;             // by bucket: whether it has all gradients of this pass; true if frozen
};

}  // namespace tessera::internal
