#pragma once

#include <cstdint>
#include <string_view>

namespace tessera::internal {

// The result of append_all().
struct Appended {
  int error_number = 0;  // errno of a failed write; 0: all bytes are written
  bool is_whole = true;  // false: the file ends with a part of the bytes
};

// Appends bytes to a file of `before_bytes` bytes that is open for appending. If a write fails, removes the written
// bytes, so that readers never find a truncated record. If the removal also fails, `is_whole` is false.
Appended append_all(int descriptor, std::string_view bytes, int64_t before_bytes) noexcept;

}  // namespace tessera::internal
