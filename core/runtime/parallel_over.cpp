#include "core/runtime/parallel_over.h"

#include <ATen/Parallel.h>

namespace tessera::internal {

void parallel_over(int64_t begin, int64_t end, int64_t grain_numel, c10::function_ref<void(int64_t, int64_t)> body) {
  if (begin >= end) return;
  // A small range bypasses the thread pool, which does not exist in a child that a process with threads forked.
  if (end - begin <= grain_numel) return body(begin, end);
  at::parallel_for(begin, end, grain_numel, [body](int64_t from, int64_t to) { body(from, to); });
}

}  // namespace tessera::internal
