#pragma once

#include <cstdint>
#include <vector>

namespace tessera {

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t numel() const { return end - begin; }
};

// Where each parameter of a unit lies in the unit's flat buffer, and which part of the buffer each
// rank owns. Pure integers: planned and tested without tensors or ranks.
//
//   | p0 ..... pad | p1 .. pad | p2 ........ | pad |
//   |   rank 0     |    rank 1     |    rank 2     |   even parts, cut anywhere
//
// Parameters start at multiples of `alignment_numel`, so that a gathered parameter is aligned as an
// ordinary tensor is and kernels give the same bits. The end is padded to a multiple of the world
// size. (FSDP1's FlatParameter; here padding belongs to no parameter's view.)
class FlatLayout {
 public:
  // Throws std::invalid_argument for a negative numel, world_size < 1 or alignment_numel < 1.
  FlatLayout(std::vector<int64_t> parameter_numels, int world_size, int64_t alignment_numel);

  int world_size() const { return world_size_; }
  int64_t parameter_count() const { return static_cast<int64_t>(numels_.size()); }
  int64_t numel(int64_t parameter) const { return numels_[parameter]; }
  int64_t offset(int64_t parameter) const { return offsets_[parameter]; }

  int64_t parameters_numel() const { return parameters_numel_; }  // without padding
  int64_t full_numel() const { return shard_numel_ * world_size_; }
  int64_t shard_numel() const { return shard_numel_; }

  // The part of the flat buffer that `rank` owns.
  Range shard(int rank) const { return {rank * shard_numel_, (rank + 1) * shard_numel_}; }

  // The part of the parameter that `rank` owns, in elements of the parameter; empty ({0, 0}) if none.
  Range owned(int64_t parameter, int rank) const;

  // Where that part begins in the rank's shard (0 if it is empty).
  int64_t offset_in_shard(int64_t parameter, int rank) const;

 private:
  const std::vector<int64_t> numels_;
  const int world_size_;
  std::vector<int64_t> offsets_;
  int64_t parameters_numel_ = 0;
  int64_t shard_numel_ = 0;
};

}  // namespace tessera
