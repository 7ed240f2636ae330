#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/layout/flat_layout.h"

namespace tessera::internal {

// A rectangular part of an N-d tensor, in elements: offsets[d] <= index[d] < offsets[d] + sizes[d].
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

// Returns the elements that two boxes of one tensor share, or nullopt.
std::optional<Box> intersection(const Box& a, const Box& b);

// Splits a range of an N-d row-major tensor's elements into boxes, in order: at most 2 N - 1, none for an empty range.
std::vector<Box> boxes_of_range(const std::vector<int64_t>& sizes, Range range);

// Returns whether these strides place each element in memory once, with neither holes nor overlaps.
bool fills_memory(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides);

// Returns the dimensions from the slowest in memory to the fastest. Throws std::invalid_argument for strides with holes
// or overlaps.
std::vector<int64_t> memory_order(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides);

// A box whose elements are contiguous in memory.
struct Segment {
  Box box;       // in the tensor's own dimensions
  Range memory;  // in elements, in the order of memory
};

// Like boxes_of_range(), for a tensor with these strides and a range in memory order.
std::vector<Segment> segments_of(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, Range held);

// A run of elements, contiguous in a row-major source and target_step apart in the target.
struct Run {
  int64_t source = 0;
  int64_t target = 0;
  int64_t numel = 1;
  int64_t target_step = 1;
};

// Visits the fewest runs that copy `part` from a row-major array of `source`, in ascending source order. In the target,
// the element at index i is at sum(i * target_strides) - target_origin.
void for_each_run(const Box& part, const Box& source, const std::vector<int64_t>& target_strides, int64_t target_origin,
                  const std::function<void(const Run&)>& visit);

}  // namespace tessera::internal
