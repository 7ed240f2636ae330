#pragma once

#include "tests/accelerator/training.h"
#include "tests/support/accelerator/ranks.h"

namespace tessera::accelerator_training {
using namespace internal;

// Runs train() on devices. Returns rank 0's result. A Simulation must exist.
inline State train_on_devices(const Case& of, InitOptions options = {.timeout = std::chrono::seconds(60)}) {
  State state;
  accelerator::on_devices(
      of.world,
      [&](std::shared_ptr<Communicator> comm) {
        State own = train(of, comm);
        if (comm->rank() == 0) state = std::move(own);
      },
      options);
  return state;
}

}  // namespace tessera::accelerator_training
