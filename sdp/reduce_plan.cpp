#include "tessera/sdp/reduce_plan.h"

#include <ATen/ceil_div.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

namespace tessera {
namespace {

constexpr int64_t kAloneBytes = 1 << 20;  // from here on a message's cost is its bytes
constexpr int64_t kAlignmentBytes = 64;   // what at::empty aligns to, so that optimizers' kernels see no difference

struct Filling {
  ReduceBucket bucket;
  size_t last = 0;  // place in the order of its last member
};

}  // namespace

std::vector<ReduceBucket> plan_reduction(const std::vector<ReducedParameter>& parameters,
                                         const std::vector<size_t>& order, int64_t buffer_numel) {
  if (buffer_numel < 0)
    throw std::invalid_argument("reduce_buffer_size is " + std::to_string(buffer_numel) +
                                " elements, expected 0 (off) or more");
  std::vector<Filling> done;
  std::map<std::pair<int, at::ScalarType>, Filling> open;
  auto close = [&](Filling& filling) {
    if (!filling.bucket.members.empty()) done.push_back(std::exchange(filling, {}));
  };
  for (size_t place = 0; place < order.size(); ++place) {
    const ReducedParameter& parameter = parameters[order[place]];
    const auto element_bytes = static_cast<int64_t>(c10::elementSize(parameter.dtype));
    if (parameter.numel * element_bytes >= kAloneBytes || parameter.numel > buffer_numel || buffer_numel == 0) {
      done.push_back({{parameter.owner, {order[place]}, {0}, parameter.numel}, place});
      continue;
    }
    Filling& filling = open[{parameter.owner, parameter.dtype}];
    int64_t offset = at::round_up(filling.bucket.numel, kAlignmentBytes / element_bytes);
    if (offset + parameter.numel > buffer_numel) {
      close(filling);
      offset = 0;
    }
    filling.bucket.owner = parameter.owner;
    filling.bucket.members.push_back(order[place]);
    filling.bucket.offsets.push_back(offset);
    filling.bucket.numel = offset + parameter.numel;
    filling.last = place;
  }
  for (auto& [key, filling] : open) close(filling);
  std::sort(done.begin(), done.end(), [](const Filling& a, const Filling& b) { return a.last < b.last; });
  std::vector<ReduceBucket> buckets;
  for (Filling& filling : done) buckets.push_back(std::move(filling.bucket));
  return buckets;
}

}  // namespace tessera
