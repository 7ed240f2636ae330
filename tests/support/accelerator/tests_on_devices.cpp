// Runs tests that were written for CPUs on devices. In a program that links this file, on_ranks() runs on devices, on
// which seeded() and on_rank_device() then allocate. Each test has its own Simulation. Skips a test when it needs more
// ranks than there are GPUs.
#include <chrono>
#include <optional>

#include "tests/support/accelerator/accelerator.h"
#include "tests/support/accelerator/ranks.h"
#include "tests/support/reference.h"

namespace tessera::accelerator {
using namespace internal;
namespace {

void run(int world, const testing_support::RankBody& body) {
  std::optional<Simulation> simulation;
  if (!Simulation::is_running()) simulation.emplace();
  on_devices(world, body, std::chrono::seconds(60));
  if (simulation)
    for (const std::string& finding : Simulation::findings()) ADD_FAILURE() << finding;
}

const bool is_set = [] {
  testing_support::run_ranks_on_devices = &run;
  testing_support::adds_in_other_orders = on_gpus();
  return true;
}();

}  // namespace
}  // namespace tessera::accelerator
