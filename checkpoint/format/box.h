#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/layout/flat_layout.h"

namespace tessera::internal {

// A rectangular part of an N-d tensor, in elements: offsets[d] <= index[d] < offsets[d] + sizes[d].
// Everything here is pure integers.
struct Box {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;
  int64_t numel() const;
  bool operator==(const Box&) const = default;
};

int64_t numel_of(const std::vector<int64_t>& sizes);
Box whole_box(const std::vector<int64_t>& sizes);
std::vector<int64_t> row_major_strides(const std::vector<int64_t>& sizes);
std::string to_string(const std::vector<int64_t>& numbers);  // "[2, 3]"
std::string to_string(const Box& box);                       // "[0:2, 3:6]"

// What two boxes of one tensor share; nothing if they share no element.
std::optional<Box> intersection(const Box& a, const Box& b);

// The boxes that are together a range of a row-major tensor's elements, in its order: at most 2 N - 1, none for an
// empty range.
std::vector<Box> boxes_of_range(const std::vector<int64_t>& sizes, Range range);

// Whether a tensor of such strides has each element of its memory once: neither holes nor overlaps.
bool fills_memory(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides);

// The tensor's dimensions from the slowest in memory to the fastest. Throws std::invalid_argument for strides with
// holes or overlaps.
std::vector<int64_t> memory_order(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides);

// A box whose elements follow one another in memory.
struct Segment {
  Box box;       // in the tensor's own dimensions
  Range memory;  // in elements, in the order of memory
};

// As boxes_of_range(), for a tensor whose elements lie in memory as `strides` says, and a range in that order.
std::vector<Segment> segments_of(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, Range held);

// A run of elements that is contiguous in a row-major source; in the target its elements are target_step apart.
struct Run {
  int64_t source = 0;
  int64_t target = 0;
  int64_t numel = 1;
  int64_t target_step = 1;
};

// Visits how to copy `part` from a row-major array of the elements of `source` to a target where the element of index
// i is at sum(i * target_strides) - target_origin; in ascending order of the source, in the fewest runs.
void for_each_run(const Box& part, const Box& source, const std::vector<int64_t>& target_strides, int64_t target_origin,
                  const std::function<void(const Run&)>& visit);

}  // namespace tessera::internal
