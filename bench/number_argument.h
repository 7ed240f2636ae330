#pragma once

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string_view>

// Returns the number if the whole text is a number, otherwise nullopt.
template <class Number>
std::optional<Number> number_in(std::string_view text) {
  Number number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

// Returns argument `index` of the command line as a positive number, or `otherwise` if there is none. For any other
// text, prints an error and exits with code 2.
template <class Number>
Number number_argument(int argc, char** argv, int index, Number otherwise) {
  if (index >= argc) return otherwise;
  const auto number = number_in<Number>(argv[index]);
  if (number && *number > 0) return *number;
  std::fprintf(stderr, "%s: argument %d is '%s', expected a number above 0\n", argv[0], index, argv[index]);
  std::exit(2);
}
