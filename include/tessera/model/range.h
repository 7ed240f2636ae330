#pragma once

#include <cstdint>

namespace tessera {

// Elements from `begin` up to, and without, `end`.
struct Range {
  int64_t begin = 0;  // the first
  int64_t end = 0;    // the one after the last
  // How many.
  int64_t numel() const { return end - begin; }
};

}  // namespace tessera
