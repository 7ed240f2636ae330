#include <ATen/Parallel.h>

#include <algorithm>

#include "checkpoint/format/checksum.h"
#include "checkpoint/format/copy_block.h"

namespace tessera::internal {

BlockChecksums copy_with_checksums(char* to, const char* from, int64_t bytes, int64_t block_bytes) {
  constexpr int64_t kGrainBytes = int64_t{1} << 18;
  const int64_t count = (bytes + block_bytes - 1) / block_bytes;
  BlockChecksums result{block_bytes, std::vector<uint64_t>(static_cast<size_t>(count))};
  auto copy = &copy_block;
#ifdef __x86_64__
  // Without AVX2 the hash is slower than the memory, and a copy takes 1.6 times as long.
  if (__builtin_cpu_supports("avx2")) copy = &copy_block_avx2;
#endif
  at::parallel_for(0, count, std::max<int64_t>(1, kGrainBytes / block_bytes), [&](int64_t first, int64_t last) {
    for (int64_t i = first, begin = i * block_bytes; i < last; ++i, begin += block_bytes)
      result.sums[i] = copy(to + begin, from + begin, std::min(block_bytes, bytes - begin));
  });
  return result;
}

}  // namespace tessera::internal
