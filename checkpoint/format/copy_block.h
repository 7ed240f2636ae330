// copy_block() is compiled twice: for any processor, and for processors with AVX2. It must not use templates of the
// standard library: the linker keeps one instance of each for all callers, perhaps the one compiled for AVX2.
#pragma once

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <cstdint>
#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tessera::internal {

constexpr int64_t kCopyStepBytes = 4096;  // number of bytes that are hashed, then copied while they are in the L1 cache

// Copies with non-temporal stores if the CPU has them. Such stores do not first read the target from memory.
static inline void stream(char* to, const char* from, int64_t bytes) {
  int64_t begin = 0;
#ifdef __SSE2__
  constexpr int64_t kLine = 64;  // the processor combines the stores of a whole cache line
  const auto unaligned = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) % kLine);
  begin = bytes < unaligned ? bytes : unaligned;
  std::memcpy(to, from, static_cast<size_t>(begin));
  for (; begin + kLine <= bytes; begin += kLine) {
    const auto* const source = reinterpret_cast<const __m128i*>(from + begin);
    const __m128i line[] = {_mm_loadu_si128(source), _mm_loadu_si128(source + 1), _mm_loadu_si128(source + 2),
                            _mm_loadu_si128(source + 3)};
    _mm_prefetch(from + begin + kCopyStepBytes, _MM_HINT_T1);  // for the next step
    for (int k = 0; k < 4; ++k) _mm_stream_si128(reinterpret_cast<__m128i*>(to + begin) + k, line[k]);
  }
  _mm_sfence();  // orders these stores before later ones, such as the unlock of a mutex
#endif
  std::memcpy(to + begin, from + begin, static_cast<size_t>(bytes - begin));
}

// Copies one block, and returns its checksum. The source must not overlap the target.
static inline uint64_t copy_block(char* to, const char* from, int64_t bytes) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  for (int64_t begin = 0; begin < bytes; begin += kCopyStepBytes) {
    const int64_t count = bytes - begin < kCopyStepBytes ? bytes - begin : kCopyStepBytes;
    XXH3_64bits_update(&state, from + begin, static_cast<size_t>(count));
    stream(to + begin, from + begin, count);
  }
  return XXH3_64bits_digest(&state);
}

#ifdef __x86_64__
uint64_t copy_block_avx2(char* to, const char* from, int64_t bytes);
#endif

}  // namespace tessera::internal
