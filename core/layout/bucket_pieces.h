#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/layout/flat_layout.h"

namespace tessera::internal {

// A part of a bucket's buffer that is a tensor of its own.
struct BucketPiece {
  Range range;                     // of the layout
  std::optional<size_t> member{};  // which parameter's it is alone, so that its gradient may be sent from where it lies
};

// A gradient of fewer bytes is copied into a piece with its neighbours: sooner done than one more message. Set before
// there are wrappers, and only in tests, whose small models then travel as large ones do.
inline int64_t least_piece_bytes = int64_t{256} << 10;

// Cuts a layout so that each large parameter has a piece for itself, and what lies between two of these, padding
// included, is one. In order, none of them empty; a function of the layout alone, and so the same on all ranks.
std::vector<BucketPiece> cut_into_pieces(const FlatLayout& layout, int64_t element_bytes);

}  // namespace tessera::internal
