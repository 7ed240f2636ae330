// A user's program with one of the libraries: measures the memory of a computation.
#include <ATen/ops/ones.h>

#include <cstdio>

#include <tessera/peak_memory.h>

#ifndef NDEBUG
#error "libtorch's headers need NDEBUG"
#endif

int main() {
  tessera::PeakMemory memory;
  at::Tensor sum = at::ones({1024}, at::kDouble);
  for (int i = 0; i < 3; ++i) sum = sum.add(sum);
  std::printf("peak: %lld bytes now, %lld at most\n", static_cast<long long>(memory.current_bytes()),
              static_cast<long long>(memory.peak_bytes()));
  return memory.current_bytes() == 8192 && memory.peak_bytes() == 2 * 8192 ? 0 : 1;
}
