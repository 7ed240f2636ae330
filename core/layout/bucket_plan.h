#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <limits>
#include <vector>

namespace tessera::internal {

// A parameter in the input of plan_buckets().
struct BucketItem {
  int64_t numel = 0;
  at::ScalarType dtype = at::kFloat;
  int64_t key = 0;           // parameters share a bucket only if keys (for example owners) and dtypes are equal
  bool may_be_alone = true;  // false: goes to a bucket that others may share, regardless of its size
};

struct BucketLimits {
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  // A parameter of at least this many bytes gets its own bucket. A separate message of this size costs nothing extra.
  int64_t alone_bytes = int64_t{1} << 20;
  // Most bytes of a shared bucket. A larger parameter gets its own bucket. If 0, every parameter gets its own bucket.
  int64_t bucket_bytes = kNone;
  // A smaller limit for the first bucket to fill, so that sending starts earlier.
  int64_t first_bytes = kNone;
};

// Assigns parameters to buckets, given the order of their gradients. Returns the members of each bucket in that order,
// and the buckets in the order in which they become full. Each member starts at a multiple of the layout's alignment. A
// pure function. (Like c10d's compute_bucket_assignment_by_size and FairScale's buckets by owner.)
std::vector<std::vector<size_t>> plan_buckets(const std::vector<BucketItem>& items, const std::vector<size_t>& order,
                                              const BucketLimits& limits);

}  // namespace tessera::internal
