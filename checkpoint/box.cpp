#include "tessera/checkpoint/box.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace tessera {
namespace {

// Appends the boxes of the range in the dimensions from `dim` on, with `prefix` as the offsets
// before them.
void append_boxes(const std::vector<int64_t>& sizes, size_t dim, Range range, std::vector<int64_t>& prefix,
                  std::vector<Box>& boxes) {
  if (range.numel() <= 0) return;
  auto emit = [&](int64_t first, int64_t count) {
    Box box{prefix, std::vector<int64_t>(dim, 1)};
    if (dim < sizes.size()) {
      box.offsets.push_back(first);
      box.sizes.push_back(count);
    }
    for (size_t d = dim + 1; d < sizes.size(); ++d) {
      box.offsets.push_back(0);
      box.sizes.push_back(sizes[d]);
    }
    boxes.push_back(std::move(box));
  };
  if (dim == sizes.size()) return emit(0, 1);
  const int64_t row = std::accumulate(sizes.begin() + static_cast<std::ptrdiff_t>(dim) + 1, sizes.end(), int64_t{1},
                                      std::multiplies<>());
  auto part_of_row = [&](int64_t index, Range part) {
    prefix.push_back(index);
    append_boxes(sizes, dim + 1, part, prefix, boxes);
    prefix.pop_back();
  };
  int64_t first = range.begin / row;
  const int64_t last = range.end / row;
  if (range.begin % row != 0) {
    const int64_t end = std::min(range.end - first * row, row);
    part_of_row(first, {range.begin % row, end});
    if (first == last) return;
    ++first;
  }
  if (first < last) emit(first, last - first);
  if (range.end % row != 0) part_of_row(last, {0, range.end % row});
}

}  // namespace

int64_t numel_of(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

int64_t Box::numel() const { return numel_of(sizes); }

Box whole_box(const std::vector<int64_t>& sizes) { return {std::vector<int64_t>(sizes.size(), 0), sizes}; }

std::vector<int64_t> row_major_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

std::string to_string(const std::vector<int64_t>& numbers) {
  std::string text = "[";
  for (const int64_t number : numbers) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(number);
  }
  return text + "]";
}

std::string to_string(const Box& box) {
  std::string text = "[";
  for (size_t d = 0; d < box.sizes.size(); ++d) {
    if (d > 0) text += ", ";
    text += std::to_string(box.offsets[d]) + ":" + std::to_string(box.offsets[d] + box.sizes[d]);
  }
  return text + "]";
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
  std::vector<Box> boxes;
  std::vector<int64_t> prefix;
  append_boxes(sizes, 0, range, prefix, boxes);
  return boxes;
}

std::vector<int64_t> memory_order(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  if (sizes.size() != strides.size())
    throw std::invalid_argument("sizes " + to_string(sizes) + " and strides " + to_string(strides) +
                                " differ in length");
  std::vector<int64_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  if (numel_of(sizes) == 0) return order;
  // The stride of a dimension of one element says nothing about its place: leave it out of the comparison.
  std::vector<int64_t> longer;
  for (const int64_t d : order)
    if (sizes[d] != 1) longer.push_back(d);
  std::stable_sort(longer.begin(), longer.end(), [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
  int64_t expected = 1;
  for (size_t i = longer.size(); i-- > 0;) {
    if (strides[longer[i]] != expected)
      throw std::invalid_argument("a tensor of sizes " + to_string(sizes) + " with strides " + to_string(strides) +
                                  " does not fill its memory");
    expected *= sizes[longer[i]];
  }
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
    Segment segment{whole_box(sizes), {begin, begin + box.numel()}};
    for (size_t i = 0; i < order.size(); ++i) {
      segment.box.offsets[order[i]] = box.offsets[i];
      segment.box.sizes[order[i]] = box.sizes[i];
    }
    begin = segment.memory.end;
    segments.push_back(std::move(segment));
  }
  return segments;
}

void for_each_run(const Box& part, const Box& source, const std::vector<int64_t>& target_strides, int64_t target_origin,
                  const std::function<void(const Run&)>& visit) {
  struct Dimension {
    int64_t size, source_stride, target_stride;
  };
  const auto source_strides = row_major_strides(source.sizes);
  int64_t source_begin = 0, target_begin = -target_origin;
  std::vector<Dimension> dimensions;  // neighbours that are one dimension in both arrays become one
  for (size_t d = 0; d < part.sizes.size(); ++d) {
    source_begin += (part.offsets[d] - source.offsets[d]) * source_strides[d];
    target_begin += part.offsets[d] * target_strides[d];
    if (part.sizes[d] == 0) return;
    if (part.sizes[d] == 1) continue;
    const Dimension next{part.sizes[d], source_strides[d], target_strides[d]};
    if (!dimensions.empty() && dimensions.back().source_stride == next.source_stride * next.size &&
        dimensions.back().target_stride == next.target_stride * next.size) {
      dimensions.back() = {dimensions.back().size * next.size, next.source_stride, next.target_stride};
    } else {
      dimensions.push_back(next);
    }
  }
  Run run{.numel = 1};
  // The innermost dimension is a run only if it is contiguous in the source.
  if (!dimensions.empty() && dimensions.back().source_stride == 1) {
    run.numel = dimensions.back().size;
    run.target_step = dimensions.back().target_stride;
    dimensions.pop_back();
  }
  std::vector<int64_t> index(dimensions.size(), 0);
  for (;;) {
    run.source = source_begin;
    run.target = target_begin;
    for (size_t d = 0; d < dimensions.size(); ++d) {
      run.source += index[d] * dimensions[d].source_stride;
      run.target += index[d] * dimensions[d].target_stride;
    }
    visit(run);
    size_t d = dimensions.size();
    while (d > 0 && ++index[d - 1] == dimensions[d - 1].size) index[--d] = 0;
    if (d == 0) return;
  }
}

}  // namespace tessera
