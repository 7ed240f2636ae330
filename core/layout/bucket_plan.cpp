#include "core/layout/bucket_plan.h"

#include <ATen/ceil_div.h>

#include <algorithm>
#include <map>
#include <utility>

#include "core/layout/flat_layout.h"

namespace tessera::internal {
namespace {

struct Filling {
  std::vector<size_t> members;
  int64_t end_numel = 0;
  size_t last = 0;  // position of the last member in `order`
};

}  // namespace

std::vector<std::vector<size_t>> plan_buckets(const std::vector<BucketItem>& items, const std::vector<size_t>& order,
                                              const BucketLimits& limits) {
  std::vector<Filling> full;
  std::map<std::pair<int64_t, at::ScalarType>, Filling> open;
  for (size_t place = 0; place < order.size(); ++place) {
    const BucketItem& item = items[order[place]];
    const auto element_bytes = static_cast<int64_t>(c10::elementSize(item.dtype));
    const int64_t cap_bytes = full.empty() ? std::min(limits.first_bytes, limits.bucket_bytes) : limits.bucket_bytes;
    const int64_t cap_numel = cap_bytes / element_bytes;
    if (item.may_be_alone &&
        (item.numel * element_bytes >= limits.alone_bytes || item.numel > cap_numel || cap_numel == 0)) {
      full.push_back({{order[place]}, item.numel, place});
      continue;
    }
    Filling& filling = open[{item.key, item.dtype}];
    int64_t offset = at::round_up(filling.end_numel, FlatLayout::alignment_numel(element_bytes));
    if (offset + item.numel > cap_numel && !filling.members.empty()) {
      full.push_back(std::exchange(filling, {}));
      offset = 0;
    }
    filling.members.push_back(order[place]);
    filling.end_numel = offset + item.numel;
    filling.last = place;
  }
  for (auto& [key, filling] : open)
    if (!filling.members.empty()) full.push_back(std::move(filling));
  std::ranges::sort(full, {}, &Filling::last);
  std::vector<std::vector<size_t>> buckets;
  for (Filling& filling : full) buckets.push_back(std::move(filling.members));
  return buckets;
}

}  // namespace tessera::internal
