#include "checkpoint/format/checksum.h"

#include <stdexcept>

// Compiles xxHash into this file, so that no library must be linked and the compiler can vectorize the hash.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tessera::internal {
namespace {

constexpr char kDigits[] = "0123456789abcdef";

uint64_t digit_of(char character) {
  if (character >= '0' && character <= '9') return static_cast<uint64_t>(character - '0');
  if (character >= 'a' && character <= 'f') return uint64_t{10} + static_cast<uint64_t>(character - 'a');
  throw std::invalid_argument("expected lower-case hex digits");
}

}  // namespace

uint64_t checksum(const void* data, int64_t bytes) { return XXH3_64bits(data, static_cast<size_t>(bytes)); }

std::string to_hex(uint64_t number) {
  std::string text(16, '0');
  for (size_t i = 16; i-- > 0; number >>= 4) text[i] = kDigits[number & 15];
  return text;
}

uint64_t from_hex(std::string_view digits) {
  if (digits.size() != 16) throw std::invalid_argument("expected 16 hex digits");
  uint64_t number = 0;
  for (const char character : digits) number = number << 4 | digit_of(character);
  return number;
}

std::string bytes_to_hex(std::string_view bytes) {
  std::string text;
  text.reserve(2 * bytes.size());
  for (const char character : bytes) {
    const auto byte = static_cast<unsigned char>(character);
    text += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return text;
}

std::string bytes_from_hex(std::string_view digits) {
  if (digits.size() % 2 != 0) throw std::invalid_argument("expected an even number of hex digits");
  std::string bytes;
  bytes.reserve(digits.size() / 2);
  for (size_t i = 0; i < digits.size(); i += 2)
    bytes += static_cast<char>(digit_of(digits[i]) << 4 | digit_of(digits[i + 1]));
  return bytes;
}

}  // namespace tessera::internal
