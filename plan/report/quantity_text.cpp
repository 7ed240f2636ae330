#include "plan/report/quantity_text.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <system_error>

namespace tessera::internal {

std::optional<double> quantity_of_text(std::string_view text, const std::map<std::string_view, double>& units,
                                       bool is_speed) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  std::string_view name = text.substr(static_cast<size_t>(end - text.data()));
  name.remove_prefix(std::min(name.find_first_not_of(' '), name.size()));
  for (const std::string_view per_s : {"/s", "ps"})
    if (is_speed && name.size() > per_s.size() && name.ends_with(per_s)) name.remove_suffix(per_s.size());
  const auto unit = units.find(name);
  if (error != std::errc() || unit == units.end() || !(number >= 0)) return std::nullopt;
  constexpr double kLeastWithoutUnit = 1e6;
  if (name.empty() && number < kLeastWithoutUnit) return std::nullopt;
  return std::isfinite(number * unit->second) ? std::optional(number * unit->second) : std::nullopt;
}

ByteUnit unit_for(int64_t most_bytes) {
  return most_bytes >= int64_t{4} << 30 ? ByteUnit{"GiB", 0x1p30} : ByteUnit{"MiB", 0x1p20};
}

std::string counted(int64_t number, const std::string& noun) {
  return std::to_string(number) + " " + noun + (number == 1 ? "" : "s");
}

}  // namespace tessera::internal
