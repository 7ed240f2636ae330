#pragma once

#include <cstdint>
#include <string_view>

namespace tessera::internal {

// How append_all() went.
struct Appended {
  int error_number = 0;  // errno's, if the disk refused; 0: all is written
  bool is_whole = true;  // the file ends where it did, or with all of it
};

// Adds bytes to a file that is open to be appended to and has `before_bytes`, so that readers who count on whole
// records find none that is cut: all of them, or none.
Appended append_all(int descriptor, std::string_view bytes, int64_t before_bytes) noexcept;

}  // namespace tessera::internal
