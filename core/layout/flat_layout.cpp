#include "core/layout/flat_layout.h"

#include <ATen/ceil_div.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/runtime/require.h"

namespace tessera::internal {

FlatLayout::FlatLayout(std::vector<int64_t> parameter_numels, Cut cut, int world_size, int64_t alignment_numel)
    : numels_(std::move(parameter_numels)), cut_(cut), world_size_(world_size) {
  require(world_size >= 1, "a layout for a world of ", world_size, ", expected at least 1");
  require(alignment_numel >= 1, "a layout aligned to ", alignment_numel, " elements, expected 1 or more");
  offsets_.reserve(numels_.size());
  int64_t end = 0;
  for (int64_t numel : numels_) {
    if (numel < 0) throw std::invalid_argument("a layout for a parameter of " + std::to_string(numel) + " elements");
    const int64_t begin = numel == 0 ? end : at::round_up(end, alignment_numel);
    offsets_.push_back(begin);
    end = begin + numel;
    parameters_numel_ += numel;
  }
  full_numel_ = cut == Cut::kEvenly ? at::round_up<int64_t>(end, world_size) : end;
}

FlatLayout FlatLayout::by_owner(std::vector<int64_t> parameter_numels, const std::vector<int>& owners, int world_size,
                                int64_t alignment_numel) {
  FlatLayout layout(std::move(parameter_numels), Cut::kByOwner, world_size, alignment_numel);
  if (owners.size() != layout.numels_.size() || !std::ranges::is_sorted(owners) ||
      (!owners.empty() && (owners.front() < 0 || owners.back() >= world_size)))
    throw std::invalid_argument("a layout by owner: expected an owner for each parameter, ranks in ascending order");
  layout.begins_.assign(world_size + 1, layout.full_numel_);
  for (size_t i = owners.size(); i-- > 0;) layout.begins_[owners[i]] = layout.offsets_[i];
  for (int rank = world_size; rank-- > 0;)
    layout.begins_[rank] = std::min(layout.begins_[rank], layout.begins_[rank + 1]);
  if (!owners.empty()) std::fill_n(layout.begins_.begin(), owners.front() + 1, 0);
  return layout;
}

Range FlatLayout::shard(int rank) const {
  if (cut_ == Cut::kByOwner) return {begins_[rank], begins_[rank + 1]};
  if (cut_ == Cut::kWhole) return {0, full_numel_};
  const int64_t each = full_numel_ / world_size_;
  return {rank * each, (rank + 1) * each};
}

std::vector<int64_t> FlatLayout::counts() const {
  std::vector<int64_t> counts;
  if (cut_ == Cut::kByOwner)
    for (int rank = 0; rank < world_size_; ++rank) counts.push_back(shard_numel(rank));
  return counts;
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

std::vector<BucketPiece> cut_into_pieces(const FlatLayout& layout, int64_t element_bytes, int64_t least_bytes) {
  std::vector<BucketPiece> pieces;
  int64_t end = 0;
  const auto add_up_to = [&](int64_t begin) {
    if (begin > end) pieces.push_back({{end, begin}});
  };
  for (int64_t parameter = 0; parameter < layout.parameter_count(); ++parameter) {
    if (layout.numel(parameter) == 0 || layout.numel(parameter) * element_bytes < least_bytes) continue;
    const int64_t begin = layout.offset(parameter);
    add_up_to(begin);
    end = begin + layout.numel(parameter);
    pieces.push_back({{begin, end}, static_cast<size_t>(parameter)});
  }
  add_up_to(layout.full_numel());
  return pieces;
}

}  // namespace tessera::internal
