#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

// Needs at least one value. With an even number of values, returns the upper of the middle two.
inline double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + static_cast<int64_t>(values.size() / 2));
  return values[values.size() / 2];
}
