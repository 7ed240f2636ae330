#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace tessera::internal {

// at::parallel_for: calls body(from, to) for parts of [begin, end) that are all of it, at least grain_numel each where
// they are several, on as many threads as at::get_num_threads() says, the caller's among them. Returns when all have;
// throws what a body throws. Any thread; within another one's body it runs on the caller's alone.
//
// That function of libtorch's is its header's, which runs on one thread alone where it is compiled without OpenMP. So
// the file of this one is compiled with it, and no other need be.
void parallel_over(int64_t begin, int64_t end, int64_t grain_numel, c10::function_ref<void(int64_t, int64_t)> body);

}  // namespace tessera::internal
