#include "tessera/flat/flat_layout.h"

#include <ATen/ceil_div.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace tessera {

FlatLayout::FlatLayout(std::vector<int64_t> parameter_numels, int world_size, int64_t alignment_numel)
    : numels_(std::move(parameter_numels)), world_size_(world_size) {
  if (world_size < 1)
    throw std::invalid_argument("a layout for a world of " + std::to_string(world_size) + ", expected at least 1");
  if (alignment_numel < 1)
    throw std::invalid_argument("a layout aligned to " + std::to_string(alignment_numel) +
                                " elements, expected 1 or more");
  offsets_.reserve(numels_.size());
  int64_t end = 0;
  for (int64_t numel : numels_) {
    if (numel < 0) throw std::invalid_argument("a layout for a parameter of " + std::to_string(numel) + " elements");
    const int64_t begin = numel == 0 ? end : at::round_up(end, alignment_numel);
    offsets_.push_back(begin);
    end = begin + numel;
    parameters_numel_ += numel;
  }
  shard_numel_ = at::ceil_div<int64_t>(end, world_size);
}

Range FlatLayout::owned(int64_t parameter, int rank) const {
  const int64_t offset = offsets_[parameter];
  const Range part = shard(rank);
  const int64_t begin = std::max(offset, part.begin) - offset;
  const int64_t end = std::min(offset + numels_[parameter], part.end) - offset;
  return begin < end ? Range{begin, end} : Range{};
}

int64_t FlatLayout::offset_in_shard(int64_t parameter, int rank) const {
  const Range part = owned(parameter, rank);
  return part.numel() == 0 ? 0 : offsets_[parameter] + part.begin - shard(rank).begin;
}

}  // namespace tessera
