#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

// Of one value or more; of an even number of them the upper one.
inline double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + static_cast<int64_t>(values.size() / 2));
  return values[values.size() / 2];
}
