// Prints the seed of a test that fails in a Simulation, so that the test can be repeated with this seed.
#include <gtest/gtest.h>

#include <iostream>

#include "tests/support/accelerator/accelerator.h"

namespace tessera::accelerator {
namespace {

class FailingSeed : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.failed() && Simulation::is_running() && !on_gpus())
      std::cout << "to repeat it: TESSERA_ACCELERATOR_SEED=" << settings().seed << std::endl;
  }
};

const bool listens = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new FailingSeed);
  return true;
}();

}  // namespace
}  // namespace tessera::accelerator
