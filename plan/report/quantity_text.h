#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::internal {

// Parses a number and a unit (a key of `units`), with optional spaces between them. If `is_speed`, "/s" or "ps" may
// follow. Returns the number times the unit's factor. Returns nullopt for any other text and for a negative number.
// Also returns nullopt for a number below a million without a unit: "80" and "400" most likely mean GiB and Gbit.
std::optional<double> quantity_of_text(std::string_view text, const std::map<std::string_view, double>& units,
                                       bool is_speed = false);

// unit_for() returns the unit for a table whose largest value is `most_bytes`: GiB from 4 GiB on, otherwise MiB.
struct ByteUnit {
  const char* name;
  double bytes;
};
ByteUnit unit_for(int64_t most_bytes);

// Returns a number with a noun, which is in the plural if the number is not 1: "1 rank", "2 ranks".
std::string counted(int64_t number, const std::string& noun);

}  // namespace tessera::internal
