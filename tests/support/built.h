#pragma once

#include <filesystem>
#include <string>

namespace tessera::testing_support {

// A file of the source or build tree, by its way from the folder of this program: tessera_test_knows() defines it as
// that. The whole path would be another one in each clone, and ccache could not lend what it has compiled of a test.
inline std::string built(const char* from_here) {
  static const auto folder = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  return (folder / from_here).lexically_normal().string();
}

}  // namespace tessera::testing_support
