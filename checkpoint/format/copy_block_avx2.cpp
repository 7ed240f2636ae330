// Compiled with -mavx2.
#include "checkpoint/format/copy_block.h"

#ifdef __x86_64__
uint64_t tessera::internal::copy_block_avx2(char* to, const char* from, int64_t bytes) {
  return copy_block(to, from, bytes);
}
#endif
