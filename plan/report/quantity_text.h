#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::internal {

// Parses a number with a unit, a key of `units`, with optional spaces; with is_speed an optional "/s" or "ps" after it.
// Returns it in the unit of factor 1, or nullopt if the text has another form or the value is negative or not finite.
std::optional<double> quantity_of_text(std::string_view text, const std::map<std::string_view, double>& units,
                                       bool is_speed = false);

// The unit for a table whose largest value is most_bytes: MiB, or GiB from 4 GiB on.
struct ByteUnit {
  const char* name;
  double bytes;
};
ByteUnit unit_for(int64_t most_bytes);

// "1 rank", "2 ranks"
std::string counted(int64_t number, const std::string& noun);

}  // namespace tessera::internal
