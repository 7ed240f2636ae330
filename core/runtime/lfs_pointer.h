#pragma once

#include <string>
#include <string_view>

namespace tessera::internal {

// Returns "" or, if a file begins like a pointer of Git LFS, the reason why it is not the file.
inline std::string lfs_problem(std::string_view beginning) {
  return beginning.starts_with("version https://git-lfs")
             ? "is a pointer of Git LFS, not the file itself: fetch it by `git lfs pull`"
             : "";
}

}  // namespace tessera::internal
