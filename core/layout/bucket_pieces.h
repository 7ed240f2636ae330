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

// Cuts a layout into pieces: each parameter of at least least_bytes, and the elements between two such parameters,
// padding included. Pieces are in order and not empty. The result is the same on all ranks.
std::vector<BucketPiece> cut_into_pieces(const FlatLayout& layout, int64_t element_bytes, int64_t least_bytes);

}  // namespace tessera::internal
