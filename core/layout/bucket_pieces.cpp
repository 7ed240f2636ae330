#include "core/layout/bucket_pieces.h"

namespace tessera::internal {

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
