#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/layout/flat_layout.h"

namespace tessera::internal {

// A part of a bucket's buffer that is a separate tensor.
struct BucketPiece {
  Range range;                     // of the layout
  std::optional<size_t> member{};  // the only member in the piece, whose gradient may be sent without a copy
};

// Cuts a layout: each parameter of at least least_bytes is a separate piece. The elements between two of these, padding
// included, are one piece. Pieces are in order and not empty. The same on all ranks.
std::vector<BucketPiece> cut_into_pieces(const FlatLayout& layout, int64_t element_bytes, int64_t least_bytes);

}  // namespace tessera::internal
