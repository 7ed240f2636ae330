#pragma once

#include <filesystem>
#include <string>

namespace tessera::testing_support {

// Returns the absolute path of a file in the source or build tree. `from_here` is relative to this program's folder;
// tessera_test_knows() in CMake defines it. (Absolute paths in macros would keep ccache from sharing objects.)
inline std::string built(const char* from_here) {
  static const auto folder = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  return (folder / from_here).lexically_normal().string();
}

}  // namespace tessera::testing_support
