#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/layout/flat_layout.h"

namespace tessera::internal {

// A part of a bucket's buffer that is a separate tensor.
struct BucketPiece {
  Range range;                     // elements of the layout's buffer
  std::optional<size_t> member{};  // the parameter that is the whole piece, if any; its gradient may be sent uncopied
};

// Cuts a layout into pieces, in order and not empty. Each parameter of at least `least_bytes` bytes is a piece. The
// elements before, between and after such parameters are pieces, padding included. All ranks get the same result.
std::vector<BucketPiece> cut_into_pieces(const FlatLayout& layout, int64_t element_bytes, int64_t least_bytes);

}  // namespace tessera::internal
