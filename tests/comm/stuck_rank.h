#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "tests/support/reference.h"

namespace tessera::testing_support {
using namespace internal;

// The first error of three ranks. Rank 1 is stuck until the others have given up `collective`.
inline std::string error_beside_a_stuck_rank(const InitOptions& options,
                                             const std::function<void(Communicator&)>& collective) {
  std::atomic<int> ended = 0;
  return error_of<CommError>([&] {
    run_ranks(
        3,
        [&](std::shared_ptr<Communicator> comm) {
          if (comm->rank() == 1) {
            while (ended < 2) std::this_thread::sleep_for(std::chrono::milliseconds(20));
            return;
          }
          try {
            collective(*comm);
          } catch (const CommError&) {
            ++ended;
            throw;
          }
        },
        options);
  });
}

}  // namespace tessera::testing_support
