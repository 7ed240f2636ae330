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
  bool may_be_alone = true;  // false: `alone_bytes` does not apply to this parameter
};

struct BucketLimits {
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  // A parameter of at least this many bytes gets its own bucket: at that size, a shared message would save no time.
  int64_t alone_bytes = int64_t{1} << 20;
  // Byte limit of a shared bucket. A larger parameter gets its own bucket. If 0, each parameter gets its own bucket.
  int64_t bucket_bytes = kNone;
  // Byte limit until the first bucket is full. A limit below bucket_bytes lets reductions start earlier.
  int64_t first_bytes = kNone;
};

// Assigns parameters to buckets. `order` lists indices of `items`, in the order in which gradients arrive. Returns each
// bucket's indices, sorted as in `order`. Buckets are in the order in which they become full. Sizes include the padding
// of FlatLayout. A pure function. (Like c10d's compute_bucket_assignment_by_size and FairScale's buckets by owner.)
std::vector<std::vector<size_t>> plan_buckets(const std::vector<BucketItem>& items, const std::vector<size_t>& order,
                                              const BucketLimits& limits);

}  // namespace tessera::internal
