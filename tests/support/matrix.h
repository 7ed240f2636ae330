#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

namespace tessera::testing_support {

// Returns whether to test all combinations of worlds, options and models: if TESSERA_TEST_MATRIX=full, which
// `make matrix` sets. Otherwise, tests cover each value of each axis, but not all combinations.
inline bool has_full_matrix() {
  const char* text = std::getenv("TESSERA_TEST_MATRIX");
  if (text == nullptr || std::string(text) == "short") return false;
  if (std::string(text) != "full")
    throw std::invalid_argument(std::string("TESSERA_TEST_MATRIX is '") + text + "', expected full or short");
  return true;
}

// Returns `always`, and in the full matrix also `more`.
template <class T>
std::vector<T> of_matrix(std::vector<T> always, const std::vector<T>& more) {
  if (has_full_matrix()) always.insert(always.end(), more.begin(), more.end());
  return always;
}

}  // namespace tessera::testing_support
