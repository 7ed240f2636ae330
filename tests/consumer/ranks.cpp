// A user's program with ranks and collectives, without wrappers.
#include <ATen/ops/full.h>

#include <atomic>
#include <cstdio>
#include <exception>
#include <memory>

#include <tessera/communicator.h>
#include <tessera/launch.h>

int main() {
  try {
    std::atomic<int> right = 0;
    tessera::run_ranks(2, [&](std::shared_ptr<tessera::Communicator> comm) {
      at::Tensor sum = at::full({8}, comm->rank() + 1.0);
      comm->all_reduce(sum, tessera::ReduceOp::kSum, "the ranks").wait();
      if (sum.eq(3).all().item<bool>()) ++right;
    });
    std::printf("ranks: %d of 2 have the sum\n", right.load());
    return right == 2 ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ranks: %s\n", error.what());
    return 1;
  }
}
