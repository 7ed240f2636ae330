// Checks of the examples' command lines.
#pragma once

#include <boost/program_options/variables_map.hpp>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>

namespace examples {

// Reports an invalid command line. main() catches it and returns 2.
class OptionsError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Throws OptionsError if an option other than --prompt has an empty text as its value.
void refuse_empty(const boost::program_options::variables_map& values);

struct Range {
  const char* option;
  int64_t value, least, most;
};
// Throws OptionsError for the first value that is out of its range.
void check_ranges(std::initializer_list<Range> ranges);
// Throws OptionsError unless the value is finite and at least 0.
void check_not_negative(const char* option, double value);

}  // namespace examples
