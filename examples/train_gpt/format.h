#pragma once

#include <cstdint>
#include <string>

namespace train_gpt {

std::string fixed(double value, int digits);  // "1.842"
std::string grouped(int64_t value);           // "1,228,800"
std::string brief(double value);              // "950", "12.3k", "1.2M"
std::string mib(int64_t bytes);               // "1.53"
std::string duration(double seconds);         // "0:07", "12:34", "1:02:03"

// Padded with spaces to a number of columns, counting UTF-8 characters.
std::string left(std::string text, size_t columns);
std::string right(std::string text, size_t columns);
size_t columns_of(const std::string& text);
std::string cut(const std::string& text, size_t columns);

// Text that may be shown on a terminal: control characters, but for new lines and tabs, and bytes
// that are not UTF-8 become '?'.
std::string printable(const std::string& text);

// Breaks lines between words, at most `columns` wide, with `indent` in front of each.
std::string wrapped(const std::string& text, size_t columns, const std::string& indent);

}  // namespace train_gpt
