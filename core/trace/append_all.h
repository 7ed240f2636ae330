#pragma once

#include <cstdint>
#include <string_view>

namespace tessera::internal {

// The result of append_all().
struct Appended {
  int error_number = 0;  // errno of the failed write, or 0 if all bytes were written
  bool is_whole = true;  // false if the file ends with an incomplete part of the bytes
};

// Appends bytes to a file that is open for appending and has `before_bytes` bytes. If a write fails, truncates the file
// to `before_bytes`, so that readers find no incomplete record. If the truncation also fails, `is_whole` is false.
Appended append_all(int descriptor, std::string_view bytes, int64_t before_bytes) noexcept;

}  // namespace tessera::internal
