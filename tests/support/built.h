#pragma once

#include <filesystem>
#include <string>

namespace tessera::testing_support {

// Returns a file of the source or build tree from its path relative to this program's folder, as tessera_test_knows()
// defines it. An absolute path would differ between clones, so ccache could not share objects.
inline std::string built(const char* from_here) {
  static const auto folder = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  return (folder / from_here).lexically_normal().string();
}

}  // namespace tessera::testing_support
