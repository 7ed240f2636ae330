#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace tessera::internal {

// Calls body(from, to) for disjoint ranges that cover [begin, end), as at::parallel_for does. Uses at most
// at::get_num_threads() threads, including the caller's, and at most one for each `grain_numel` elements. Blocks until
// all calls return; if some throw, rethrows one exception. Thread-safe; nested calls run on the calling thread alone.
//
// at::parallel_for is a template that uses one thread if it is compiled without OpenMP. So this function's file is
// compiled with OpenMP, and no other file needs OpenMP.
void parallel_over(int64_t begin, int64_t end, int64_t grain_numel, c10::function_ref<void(int64_t, int64_t)> body);

}  // namespace tessera::internal
