#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/layout/flat_layout.h"

namespace tessera::internal {

// A rectangular part of an N-d tensor: the elements with offsets[d] <= index[d] < offsets[d] + sizes[d].
struct Box {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;
  int64_t numel() const;
  bool operator==(const Box&) const = default;
};

int64_t numel_of(const std::vector<int64_t>& sizes);
Box whole_box(const std::vector<int64_t>& sizes);
std::vector<int64_t> row_major_strides(const std::vector<int64_t>& sizes);
std::string to_string(const std::vector<int64_t>& numbers);  // returns "[2, 3]"
std::string to_string(const Box& box);                       // returns "[0:2, 3:6]"

// Returns the elements that two boxes of one tensor share, or nullopt if there are none.
std::optional<Box> intersection(const Box& a, const Box& b);

// Splits a range of a row-major N-d tensor's elements into consecutive boxes. Returns at most max(1, 2 N - 1) boxes.
std::vector<Box> boxes_of_range(const std::vector<int64_t>& sizes, Range range);

// Returns whether a tensor with these sizes and strides fills contiguous memory, without holes or overlaps.
bool fills_memory(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides);

// Returns the dimensions, sorted by descending stride. Dimensions of size 1, and all dimensions of empty tensors, keep
// their positions. Throws std::invalid_argument if fills_memory() is false, or if the two lists differ in length.
std::vector<int64_t> memory_order(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides);

// A box whose elements are contiguous in memory.
struct Segment {
  Box box;       // indices in the tensor's own dimensions
  Range memory;  // positions of the box's elements in the tensor's memory order
};

// Splits `held`, a range of a tensor's elements in memory order, into segments. Throws if memory_order() throws.
std::vector<Segment> segments_of(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, Range held);

// A copy of `numel` elements: from index `source` + i of one array to index `target` + i * `target_step` of another.
struct Run {
  int64_t source = 0;
  int64_t target = 0;
  int64_t numel = 1;
  int64_t target_step = 1;
};

// Splits `part`, a box inside the box `source`, into as few runs as possible. Visits the runs in the row-major order of
// `source`. In the target, the element with index i has the position sum(i * target_strides) - target_origin.
void for_each_run(const Box& part, const Box& source, const std::vector<int64_t>& target_strides, int64_t target_origin,
                  const std::function<void(const Run&)>& visit);

}  // namespace tessera::internal
