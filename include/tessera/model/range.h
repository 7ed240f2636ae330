#pragma once

#include <cstdint>

namespace tessera {

// A range of elements: [begin, end).
struct Range {
  int64_t begin = 0;  // the first element
  int64_t end = 0;    // the element after the last
  // Returns the number of elements.
  int64_t numel() const { return end - begin; }
};

}  // namespace tessera
