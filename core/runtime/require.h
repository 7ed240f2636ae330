#pragma once

#include <c10/util/StringUtil.h>

#include <chrono>
#include <stdexcept>

namespace tessera::internal {

// The longest permitted timeout or grace period. Adding more than a year to a clock may overflow.
inline constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365);

// If `holds` is false, throws an Error with the concatenation of `otherwise`, which is evaluated in any case.
template <class Error = std::invalid_argument, class... Parts>
void require(bool holds, const Parts&... otherwise) {
  if (!holds) throw Error(c10::str(otherwise...));
}

}  // namespace tessera::internal
