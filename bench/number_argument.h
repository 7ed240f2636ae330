#pragma once

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <string_view>

// Returns argument `index` of the command line as a positive number, or `otherwise` if there is none. For any other
// text, prints an error and exits with code 2.
template <class Number>
Number number_argument(int argc, char** argv, int index, Number otherwise) {
  if (index >= argc) return otherwise;
  const std::string_view text = argv[index];
  Number number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc() && end == text.data() + text.size() && number > 0) return number;
  std::fprintf(stderr, "%s: argument %d is '%s', expected a number above 0\n", argv[0], index, argv[index]);
  std::exit(2);
}
