#include "examples/common/option_checks.h"

#include <cmath>
#include <set>
#include <sstream>
#include <string>

namespace examples {

void refuse_empty(const boost::program_options::variables_map& values) {
  static const std::set<std::string> kMayBeEmpty = {"prompt", "demo", "help"};  // "demo" and "help" take no value
  for (const auto& [option, value] : values)
    if (const auto* text = boost::any_cast<std::string>(&value.value());
        text != nullptr && text->empty() && !kMayBeEmpty.contains(option))
      throw OptionsError("--" + option + " is empty: give a value, or leave the option out");
}

void check_ranges(std::initializer_list<Range> ranges) {
  for (const auto& [option, value, least, most] : ranges)
    if (value < least || value > most)
      throw OptionsError("--" + std::string(option) + " must be at " +
                         (value < least ? "least " + std::to_string(least) : "most " + std::to_string(most)) +
                         ", got " + std::to_string(value));
}

void check_not_negative(const char* option, double value) {
  if (!(value >= 0.0 && std::isfinite(value)))
    throw OptionsError(
        (std::ostringstream() << "--" << option << " must be a number of at least 0, got " << value).str());
}

}  // namespace examples
