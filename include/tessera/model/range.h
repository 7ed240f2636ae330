#pragma once

#include <cstdint>

namespace tessera {

// Elements in [begin, end).
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t numel() const { return end - begin; }
};

}  // namespace tessera
