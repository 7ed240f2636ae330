#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/layout/flat_layout.h"

namespace tessera::internal {

// A part of a bucket's buffer that is a separate tensor.
struct BucketPiece {
  Range range;                     // elements of the layout's buffer
  std::optional<size_t> member{};  // parameter that fills the whole piece, if any; its gradient may be sent uncopied
};

// Cuts a layout into pieces, in order and without empty pieces. Each parameter of at least `least_bytes` bytes is one
// piece. The elements (and padding) between such parameters also form pieces. All ranks compute the same pieces.
std::vector<BucketPiece> cut_into_pieces(const FlatLayout& layout, int64_t element_bytes, int64_t least_bytes);

}  // namespace tessera::internal
