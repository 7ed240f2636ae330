#include <ATen/Parallel.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstring>

#include "checkpoint/format/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tessera::internal {
namespace {

constexpr int64_t kStepBytes = 4096;  // bytes that are hashed, and then copied from the L1 cache

// Copies with non-temporal stores if the CPU has them. Such stores do not first read the target from memory.
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

}  // namespace tessera::internal
