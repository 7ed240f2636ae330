#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <tessera/model/range.h>

namespace tessera::internal {

// The offsets of parameters in a shared flat buffer, and each rank's part of the buffer. Uses only integers, so tests
// need no tensors or ranks.
//
//   | p0 ..... pad | p1 .. pad | p2 ........ | pad |
//   |   rank 0     |    rank 1     |    rank 2     |   kEvenly: FSDP's shards and reduce-scatters
//   |   rank 0                 |       rank 2      |   kByOwner: OSS's all-gathers, SDP's reductions
//   |          every rank                          |   kWhole: DDP
//
// Parameters start at multiples of `alignment_numel`. So a parameter in the buffer is aligned like an ordinary tensor,
// and kernels compute the same bits. If the cut is even, the buffer's end is padded to a multiple of the world size.
// (Like FSDP1's FlatParameter, but padding is not part of a parameter's view.)
class FlatLayout {
 public:
  enum class Cut { kEvenly, kByOwner, kWhole };

  // These functions throw std::invalid_argument for a negative numel, world_size < 1 or alignment_numel < 1.
  static FlatLayout evenly(std::vector<int64_t> parameter_numels, int world_size, int64_t alignment_numel) {
    return {std::move(parameter_numels), Cut::kEvenly, world_size, alignment_numel};
  }
  static FlatLayout whole(std::vector<int64_t> parameter_numels, int world_size, int64_t alignment_numel) {
    return {std::move(parameter_numels), Cut::kWhole, world_size, alignment_numel};
  }
  // `owners` must have a rank for each parameter, in ascending order; otherwise throws std::invalid_argument.
  static FlatLayout by_owner(std::vector<int64_t> parameter_numels, const std::vector<int>& owners, int world_size,
                             int64_t alignment_numel);

  // Returns the alignment of at::empty, in elements of `element_bytes` bytes. Every layout uses this alignment.
  static int64_t alignment_numel(int64_t element_bytes) { return element_bytes < 64 ? 64 / element_bytes : 1; }

  Cut cut() const { return cut_; }
  int world_size() const { return world_size_; }
  int64_t parameter_count() const { return static_cast<int64_t>(numels_.size()); }
  int64_t numel(int64_t parameter) const { return numels_[parameter]; }
  int64_t offset(int64_t parameter) const { return offsets_[parameter]; }

  int64_t parameters_numel() const { return parameters_numel_; }  // number of elements without padding
  int64_t full_numel() const { return full_numel_; }

  Range shard(int rank) const;  // the part of the flat buffer that belongs to `rank`
  int64_t shard_numel(int rank) const { return shard(rank).numel(); }
  // Returns the size of each rank's shard. The cut must not be by owner.
  int64_t shard_numel() const { return shard(0).numel(); }
  // Returns the shard sizes by rank, for collectives. Returns an empty list if the shards are equal (not by owner).
  std::vector<int64_t> counts() const;

  // Returns the part of a parameter that belongs to `rank`, in elements of the parameter; {0, 0} if there is none.
  Range owned(int64_t parameter, int rank) const;

  // Returns the offset of owned(parameter, rank) in the rank's shard; 0 if that part is empty.
  int64_t offset_in_shard(int64_t parameter, int rank) const;

 private:
  FlatLayout(std::vector<int64_t> parameter_numels, Cut cut, int world_size, int64_t alignment_numel);

  std::vector<int64_t> numels_;
  Cut cut_;
  int world_size_;
  std::vector<int64_t> offsets_;
  int64_t parameters_numel_ = 0;
  int64_t full_numel_ = 0;
  std::vector<int64_t> begins_;  // kByOwner: the start of each rank's shard, then the end of the last shard
};

// A part of a bucket's buffer that is a separate tensor.
struct BucketPiece {
  Range range;                     // elements of the layout's buffer
  std::optional<size_t> member{};  // parameter that fills the whole piece, if any; its gradient may be sent uncopied
};

// Cuts a layout's buffer into pieces, in order and without empty pieces. Each parameter of at least `least_bytes` bytes
// is one piece. The elements and padding around these pieces form further pieces. All ranks compute equal pieces.
std::vector<BucketPiece> cut_into_pieces(const FlatLayout& layout, int64_t element_bytes, int64_t least_bytes);

}  // namespace tessera::internal
