#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <limits>
#include <vector>

namespace tessera::internal {

// What the plan of buckets wants to know of a parameter.
struct BucketItem {
  int64_t numel = 0;
  at::ScalarType dtype = at::kFloat;
  int64_t key = 0;           // only parameters of one key (an owner, say) and one dtype share a bucket
  bool may_be_alone = true;  // false: shares a bucket, or has one to be copied into, whatever its size
};

struct BucketLimits {
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  // Parameters of so many bytes are a bucket of their own: from here on a message's cost is its bytes.
  int64_t alone_bytes = int64_t{1} << 20;
  // The most that share a bucket; a parameter that is larger is one of its own. 0: all are.
  int64_t bucket_numel = kNone;
  int64_t bucket_bytes = kNone;
  // The same for the bucket that is full first, if it is smaller, so that sending begins early.
  int64_t first_bytes = kNone;
};

// Which parameters share a bucket, given the order in which they come: by bucket its members, in order of `order`;
// buckets in the order in which they will be full. Within a bucket each begins at a multiple of the layout's
// alignment. (c10d's compute_bucket_assignment_by_size, FairScale's buckets by owner.) Pure.
std::vector<std::vector<size_t>> plan_buckets(const std::vector<BucketItem>& items, const std::vector<size_t>& order,
                                              const BucketLimits& limits);

}  // namespace tessera::internal
