#pragma once

#include <cstdint>
#include <string_view>

namespace tessera::internal {

// The result of append_all().
struct Appended {
  int error_number = 0;  // errno of a failed write; 0: all is written
  bool is_whole = true;  // the file has its former size, or all of the bytes
};

// Appends bytes to a file of `before_bytes` that is open for appending: all of them, or none. So readers never find a
// truncated record.
Appended append_all(int descriptor, std::string_view bytes, int64_t before_bytes) noexcept;

}  // namespace tessera::internal
