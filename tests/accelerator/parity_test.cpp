// Every wrapper on the simulated accelerator: bit for bit what gloo's CPUs give, and no access that nothing orders.
#include <gtest/gtest.h>

#include "tests/accelerator/simulated_training.h"
#include "tests/support/matrix.h"

namespace tessera::accelerator_parity_test {
namespace {

using namespace accelerator_training;
using accelerator::Simulation;

class AcceleratorParity : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Cases, AcceleratorParity, testing::ValuesIn(cases()),
                         [](const auto& instance) { return instance.param.name; });

TEST_P(AcceleratorParity, TrainsAsOnCpusUnderEverySeed) {
  const State expected = train_on_gloo(GetParam());
  for (const uint64_t seed : accelerator::seeds(testing_support::has_full_matrix() ? 2 : 1)) {
    const Simulation simulation({.seed = seed});
    EXPECT_EQ(difference(expected, train_on_devices(GetParam())), "");
    for (const std::string& finding : Simulation::findings()) ADD_FAILURE() << finding;
  }
}

}  // namespace
}  // namespace tessera::accelerator_parity_test
