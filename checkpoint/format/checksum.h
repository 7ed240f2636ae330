#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::internal {

// Returns the 64-bit XXH3 hash with seed 0. FORMAT.md explains why this hash was chosen.
uint64_t checksum(const void* data, int64_t bytes);
inline uint64_t checksum(std::string_view text) { return checksum(text.data(), static_cast<int64_t>(text.size())); }

// The checksums of consecutive blocks of `block_bytes` bytes. The last block may be shorter.
struct BlockChecksums {
  int64_t block_bytes = 0;
  std::vector<uint64_t> sums;
};
// Copies bytes in one pass, and returns the checksums of their blocks. On x86-64 the copy bypasses the caches. The
// source must not overlap the target, and must not change during the call. Uses at::parallel_for().
BlockChecksums copy_with_checksums(char* to, const char* from, int64_t bytes, int64_t block_bytes);

// Convert a number to and from 16 lower-case hex digits. from_hex() throws std::invalid_argument for any other text.
std::string to_hex(uint64_t number);
uint64_t from_hex(std::string_view digits);

// Convert bytes to and from two hex digits per byte. bytes_from_hex() throws std::invalid_argument for any other text.
std::string bytes_to_hex(std::string_view bytes);
std::string bytes_from_hex(std::string_view digits);

}  // namespace tessera::internal
