#include "checkpoint/format/checksum.h"

#include <ATen/Parallel.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstring>
#include <stdexcept>

// Compiles xxHash into this file, so that no library must be linked and the compiler can vectorize the hash.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tessera::internal {
namespace {

constexpr int64_t kStepBytes = 4096;  // bytes that are hashed, and then copied from the L1 cache
constexpr char kDigits[] = "0123456789abcdef";

uint64_t digit_of(char character) {
  if (character >= '0' && character <= '9') return static_cast<uint64_t>(character - '0');
  if (character >= 'a' && character <= 'f') return uint64_t{10} + static_cast<uint64_t>(character - 'a');
  throw std::invalid_argument("expected lower-case hex digits");
}

// Copies by non-temporal stores if the CPU has them, which do not read the target from memory first.
void stream(char* to, const char* from, int64_t bytes) {
  int64_t begin = 0;
#ifdef __SSE2__
  constexpr int64_t kLine = 64;  // the processor combines the stores of a whole cache line
  begin = std::min(bytes, static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) % kLine));
  std::memcpy(to, from, static_cast<size_t>(begin));
  for (; begin + kLine <= bytes; begin += kLine) {
    const auto* const source = reinterpret_cast<const __m128i*>(from + begin);
    const __m128i line[] = {_mm_loadu_si128(source), _mm_loadu_si128(source + 1), _mm_loadu_si128(source + 2),
                            _mm_loadu_si128(source + 3)};
    _mm_prefetch(from + begin + kStepBytes, _MM_HINT_T1);  // for the next step
    for (int k = 0; k < 4; ++k) _mm_stream_si128(reinterpret_cast<__m128i*>(to + begin) + k, line[k]);
  }
  _mm_sfence();  // orders these stores before later ones, such as the unlock of a mutex
#endif
  std::memcpy(to + begin, from + begin, static_cast<size_t>(bytes - begin));
}

// Copies one block, and returns its checksum.
uint64_t copy_block(char* to, const char* from, int64_t bytes) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  for (int64_t begin = 0; begin < bytes; begin += kStepBytes) {
    const int64_t count = std::min(kStepBytes, bytes - begin);
    XXH3_64bits_update(&state, from + begin, static_cast<size_t>(count));
    stream(to + begin, from + begin, count);
  }
  return XXH3_64bits_digest(&state);
}

}  // namespace

uint64_t checksum(const void* data, int64_t bytes) { return XXH3_64bits(data, static_cast<size_t>(bytes)); }

BlockChecksums copy_with_checksums(char* to, const char* from, int64_t bytes, int64_t block_bytes) {
  constexpr int64_t kGrainBytes = int64_t{1} << 18;
  const int64_t count = (bytes + block_bytes - 1) / block_bytes;
  BlockChecksums result{block_bytes, std::vector<uint64_t>(static_cast<size_t>(count))};
  at::parallel_for(0, count, std::max<int64_t>(1, kGrainBytes / block_bytes), [&](int64_t first, int64_t last) {
    for (int64_t i = first, begin = i * block_bytes; i < last; ++i, begin += block_bytes)
      result.sums[i] = copy_block(to + begin, from + begin, std::min(block_bytes, bytes - begin));
  });
  return result;
}

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
