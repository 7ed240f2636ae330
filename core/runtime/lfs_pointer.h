#pragma once

#include <string>
#include <string_view>

namespace tessera::internal {

// Returns an error text if a file's first bytes, `beginning`, are those of a Git LFS pointer; otherwise "".
inline std::string lfs_problem(std::string_view beginning) {
  return beginning.starts_with("version https://git-lfs")
             ? "is a pointer of Git LFS, not the file itself: fetch it by `git lfs pull`"
             : "";
}

}  // namespace tessera::internal
