#include "checkpoint/format/box.h"

#include <algorithm>
#include <numeric>

#include "core/runtime/require.h"

namespace tessera::internal {
namespace {

// Returns the texts text_of(d) of all dimensions d, separated by commas and in brackets: "[first, second, ...]".
template <class TextOf>
std::string in_brackets(size_t dimensions, TextOf text_of) {
  std::string text = "[";
  for (size_t d = 0; d < dimensions; ++d) text += (d > 0 ? ", " : "") + text_of(d);
  return text + "]";
}

// Returns the dimensions whose size is not 1, sorted by descending stride.
std::vector<int64_t> longer_dimensions(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  std::vector<int64_t> longer;
  for (size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] != 1) longer.push_back(static_cast<int64_t>(d));
  std::ranges::stable_sort(longer, [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
  return longer;
}

}  // namespace

int64_t numel_of(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

int64_t Box::numel() const { return numel_of(sizes); }

Box whole_box(const std::vector<int64_t>& sizes) { return {std::vector<int64_t>(sizes.size(), 0), sizes}; }

std::vector<int64_t> row_major_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<int64_t>(sizes[d], 1);
  return strides;
}

std::string to_string(const std::vector<int64_t>& numbers) {
  return in_brackets(numbers.size(), [&](size_t d) { return std::to_string(numbers[d]); });
}

std::string to_string(const Box& box) {
  return in_brackets(box.sizes.size(), [&](size_t d) {
    return std::to_string(box.offsets[d]) + ":" + std::to_string(box.offsets[d] + box.sizes[d]);
  });
}

std::optional<Box> intersection(const Box& a, const Box& b) {
  Box shared;
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    const int64_t begin = std::max(a.offsets[d], b.offsets[d]);
    const int64_t end = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    if (begin >= end) return std::nullopt;
    shared.offsets.push_back(begin);
    shared.sizes.push_back(end - begin);
  }
  return shared;
}

std::vector<Box> boxes_of_range(const std::vector<int64_t>& sizes, Range range) {
  const auto strides = row_major_strides(sizes);
  std::vector<Box> boxes;
  for (int64_t begin = range.begin; begin < range.end; begin += boxes.back().numel()) {
    // Finds the outermost dimension of which a slice (one index) starts at `begin` and fits. Adds all slices that fit.
    Box& box = boxes.emplace_back(whole_box(sizes));
    for (size_t d = 0; d < sizes.size(); ++d) {
      box.offsets[d] = begin / strides[d] % sizes[d];
      const int64_t rows = std::min((range.end - begin) / strides[d], sizes[d] - box.offsets[d]);
      const bool whole = begin % strides[d] == 0 && rows > 0;
      box.sizes[d] = whole ? rows : 1;
      if (whole) break;
    }
  }
  return boxes;
}

bool fills_memory(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  if (numel_of(sizes) == 0) return true;
  const std::vector<int64_t> longer = longer_dimensions(sizes, strides);
  int64_t expected = 1;
  for (size_t i = longer.size(); i-- > 0; expected *= sizes[longer[i]])
    if (strides[longer[i]] != expected) return false;
  return true;
}

std::vector<int64_t> memory_order(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  require(sizes.size() == strides.size(), "sizes ", to_string(sizes), " and strides ", to_string(strides),
          " differ in length");
  require(fills_memory(sizes, strides), "a tensor of sizes ", to_string(sizes), " with strides ", to_string(strides),
          " does not fill its memory");
  std::vector<int64_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  if (numel_of(sizes) == 0) return order;
  // A dimension of size 1 keeps its position, because its stride has no effect on the memory layout.
  const std::vector<int64_t> longer = longer_dimensions(sizes, strides);
  size_t next = 0;
  for (int64_t& d : order)
    if (sizes[d] != 1) d = longer[next++];
  return order;
}

std::vector<Segment> segments_of(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, Range held) {
  const auto order = memory_order(sizes, strides);
  std::vector<int64_t> ordered;
  for (const int64_t d : order) ordered.push_back(sizes[d]);
  std::vector<Segment> segments;
  int64_t begin = held.begin;
  for (const Box& box : boxes_of_range(ordered, held)) {
    Segment& segment = segments.emplace_back(Segment{whole_box(sizes), {begin, begin + box.numel()}});
    for (size_t i = 0; i < order.size(); ++i) {
      segment.box.offsets[order[i]] = box.offsets[i];
      segment.box.sizes[order[i]] = box.sizes[i];
    }
    begin = segment.memory.end;
  }
  return segments;
}

void for_each_run(const Box& part, const Box& source, const std::vector<int64_t>& target_strides, int64_t target_origin,
                  const std::function<void(const Run&)>& visit) {
  struct Dimension {
    int64_t size, source_stride, target_stride;
  };
  const auto source_strides = row_major_strides(source.sizes);
  Run run{.target = -target_origin};
  std::vector<Dimension> dimensions;  // from outer to inner; dimensions contiguous in both arrays are merged
  for (size_t d = 0; d < part.sizes.size(); ++d) {
    run.source += (part.offsets[d] - source.offsets[d]) * source_strides[d];
    run.target += part.offsets[d] * target_strides[d];
    if (part.sizes[d] == 0) return;
    if (part.sizes[d] == 1) continue;
    Dimension next{part.sizes[d], source_strides[d], target_strides[d]};
    if (!dimensions.empty() && dimensions.back().source_stride == next.source_stride * next.size &&
        dimensions.back().target_stride == next.target_stride * next.size) {
      next.size *= dimensions.back().size;
      dimensions.pop_back();
    }
    dimensions.push_back(next);
  }
  // The innermost dimension forms one run if it is contiguous in the source. Otherwise, each element is a run.
  if (!dimensions.empty() && dimensions.back().source_stride == 1) {
    run.numel = dimensions.back().size;
    run.target_step = dimensions.back().target_stride;
    dimensions.pop_back();
  }
  const std::function<void(size_t, Run)> visit_from = [&](size_t d, Run next) {
    if (d == dimensions.size()) return visit(next);
    for (int64_t i = 0; i < dimensions[d].size; ++i) {
      visit_from(d + 1, next);
      next.source += dimensions[d].source_stride;
      next.target += dimensions[d].target_stride;
    }
  };
  visit_from(0, run);
}

}  // namespace tessera::internal
