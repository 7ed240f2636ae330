// Tests every wrapper on the accelerator: results are bitwise equal to those on gloo, and no accesses are unordered. On
// GPUs, results are equal up to rounding, and groups have at most as many ranks as GPUs.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/accelerator/simulated_training.h"
#include "tests/support/matrix.h"

namespace tessera::accelerator_parity_test {
using namespace internal;
namespace {

using namespace accelerator_training;
using accelerator::Simulation;

// Returns the tolerance on GPUs. It is larger with 16 bits, because each rank's sum is rounded.
double tolerance_of(const Case& of) {
  if (!accelerator::on_gpus()) return 0;
  return of.fsdp.mixed_precision.param_dtype ? 2e-2 : 1e-4;
}

class AcceleratorParity : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Cases, AcceleratorParity, testing::ValuesIn(cases()),
                         [](const auto& instance) { return instance.param.name; });

TEST_P(AcceleratorParity, TrainsAsOnCpusUnderEverySeed) {
  Case of = GetParam();
  const int devices = accelerator::device_count();
  if (of.fsdp.hybrid.ranks_per_copy > 0 || of.fsdp.hybrid.ranks_per_secondary_copy > 0 || of.unused_on >= 0)
    accelerator::needs_devices(of.world);
  of.world = std::clamp(of.world, 1, std::max(1, devices));
  State expected;
  for (const uint64_t seed : accelerator::seeds(testing_support::has_full_matrix() ? 2 : 1)) {
    const Simulation simulation({.seed = seed});
    if (expected.empty()) expected = train_on_gloo(of);
    EXPECT_EQ(difference(expected, train_on_devices(of), tolerance_of(of)), "");
    for (const std::string& finding : Simulation::findings()) ADD_FAILURE() << finding;
  }
}

}  // namespace
}  // namespace tessera::accelerator_parity_test
