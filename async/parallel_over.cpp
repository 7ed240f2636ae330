#include "tessera/async/parallel_over.h"

#include <ATen/Parallel.h>

namespace tessera {

void parallel_over(int64_t begin, int64_t end, int64_t grain_numel, c10::function_ref<void(int64_t, int64_t)> body) {
  at::parallel_for(begin, end, grain_numel, [body](int64_t from, int64_t to) { body(from, to); });
}

}  // namespace tessera
