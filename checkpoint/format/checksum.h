#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::internal {

// Returns the 64-bit XXH3 hash with seed 0. FORMAT.md explains why this hash was chosen.
uint64_t checksum(const void* data, int64_t bytes);
inline uint64_t checksum(std::string_view text) { return checksum(text.data(), static_cast<int64_t>(text.size())); }

// Convert a number to and from 16 lower-case hex digits. from_hex() throws std::invalid_argument for any other text.
std::string to_hex(uint64_t number);
uint64_t from_hex(std::string_view digits);

// Convert bytes to and from two hex digits per byte. bytes_from_hex() throws std::invalid_argument for any other text.
std::string bytes_to_hex(std::string_view bytes);
std::string bytes_from_hex(std::string_view digits);

}  // namespace tessera::internal
