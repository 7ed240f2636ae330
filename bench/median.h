#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

// Returns the median; of an even count, the larger of the two middle values. `values` must not be empty.
inline double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + static_cast<int64_t>(values.size() / 2));
  return values[values.size() / 2];
}
