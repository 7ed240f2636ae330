#pragma once

#include <cstdint>

namespace tessera {

// A range of elements: [begin, end).
struct Range {
  int64_t begin = 0;                             // the first element
  int64_t end = 0;                               // the element after the last
  int64_t numel() const { return end - begin; }  // number of elements
};

}  // namespace tessera
