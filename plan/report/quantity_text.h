#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::internal {

// What users and data sheets write: a number and its unit, which is a key of `units`, with spaces between them or none;
// where it is of a speed, "/s" or "ps" may stand behind. In the unit whose factor is 1. Nothing if that is not what the
// text is, or less than zero, or not finite.
std::optional<double> quantity_of_text(std::string_view text, const std::map<std::string_view, double>& units,
                                       bool is_speed = false);

// What tables and sums of such bytes at most are in: MiB, or from 4 GiB on GiB.
struct ByteUnit {
  const char* name;
  double bytes;
};
ByteUnit unit_for(int64_t most_bytes);

// "1 rank", "2 ranks"
std::string counted(int64_t number, const std::string& noun);

}  // namespace tessera::internal
