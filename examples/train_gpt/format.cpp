#include "format.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <sstream>

namespace train_gpt {
namespace {

bool continues_character(char byte) { return (static_cast<unsigned char>(byte) & 0xc0) == 0x80; }

// The length of the UTF-8 character at `position`, or 0 if there is none.
size_t character_bytes(const std::string& text, size_t position) {
  const auto first = static_cast<unsigned char>(text[position]);
  size_t length = 0;
  if (first < 0x80)
    length = 1;
  else if (first >= 0xc2 && first < 0xe0)
    length = 2;
  else if (first >= 0xe0 && first < 0xf0)
    length = 3;
  else if (first >= 0xf0 && first < 0xf5)
    length = 4;
  if (position + length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if (!continues_character(text[position + i])) return 0;
  }
  return length;
}

std::string wrapped_line(const std::string& line, size_t columns, const std::string& indent) {
  std::istringstream words(line);
  std::string result, current;
  for (std::string word; words >> word;) {
    if (!current.empty() && columns_of(current) + 1 + columns_of(word) > columns) {
      result += indent + current + "\n";
      current.clear();
    }
    current += (current.empty() ? "" : " ") + word;
  }
  return result + (current.empty() ? "" : indent + current) + "\n";
}

}  // namespace

std::string fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.*f", digits, value);
  return text;
}

std::string grouped(int64_t value) {
  auto text = std::to_string(value);
  for (auto i = static_cast<int64_t>(text.size()) - 3; i > (value < 0 ? 1 : 0); i -= 3)
    text.insert(static_cast<size_t>(i), 1, ',');
  return text;
}

std::string brief(double value) {
  if (value < 1e3) return fixed(value, 0);
  if (value < 1e6) return fixed(value / 1e3, 1) + "k";
  return fixed(value / 1e6, 1) + "M";
}

std::string mib(int64_t bytes) { return fixed(static_cast<double>(bytes) / (1 << 20), 2); }

std::string duration(double seconds) {
  const long long total = std::llround(seconds);
  char text[64];
  if (total < 3600) {
    std::snprintf(text, sizeof(text), "%lld:%02lld", total / 60, total % 60);
  } else {
    std::snprintf(text, sizeof(text), "%lld:%02lld:%02lld", total / 3600, total / 60 % 60, total % 60);
  }
  return text;
}

size_t columns_of(const std::string& text) {
  return text.size() - static_cast<size_t>(std::count_if(text.begin(), text.end(), continues_character));
}

std::string left(std::string text, size_t columns) {
  const auto used = columns_of(text);
  return used < columns ? text.append(columns - used, ' ') : text;
}

std::string right(std::string text, size_t columns) {
  const auto used = columns_of(text);
  return used < columns ? text.insert(0, columns - used, ' ') : text;
}

std::string cut(const std::string& text, size_t columns) {
  size_t end = 0;
  for (size_t column = 0; end < text.size() && column < columns; ++column) {
    do ++end;
    while (end < text.size() && continues_character(text[end]));
  }
  return text.substr(0, end);
}

std::string printable(const std::string& text) {
  std::string result;
  for (size_t i = 0; i < text.size();) {
    const size_t length = character_bytes(text, i);
    const auto byte = static_cast<unsigned char>(text[i]);
    const bool control = (byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7f;
    if (length == 0 || control) {
      result += '?';
      ++i;
    } else {
      result += text.substr(i, length);
      i += length;
    }
  }
  return result;
}

std::string wrapped(const std::string& text, size_t columns, const std::string& indent) {
  std::istringstream lines(text);
  std::string result;
  for (std::string line; std::getline(lines, line);) result += wrapped_line(line, columns, indent);
  return result;
}

}  // namespace train_gpt
