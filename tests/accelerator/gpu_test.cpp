// The same training on the GPUs that there are: against gloo's CPUs to rounding. tools/gpu_check.sh runs it.
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/accelerator/training.h"

namespace tessera::gpu_test {
namespace {

using namespace accelerator_training;

int devices() { return c10::impl::VirtualGuardImpl(at::kCUDA).deviceCount(); }

class GpuTraining : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Cases, GpuTraining, testing::ValuesIn(cases()),
                         [](const auto& instance) { return instance.param.name; });

TEST_P(GpuTraining, AgreesWithCpus) {
  Case of = GetParam();
  of.world = std::min(of.world, devices());
  ASSERT_GT(of.world, 0) << "no GPU is visible";
  if (of.world < GetParam().world && (of.fsdp.hybrid.ranks_per_copy > 0 || of.unused_on >= of.world))
    GTEST_SKIP() << "needs " << GetParam().world << " GPUs";
  const State expected = train_on_gloo(of);
  State got;
  InitOptions options;
  options.device = at::kCUDA;
  run_ranks(
      of.world,
      [&](std::shared_ptr<Communicator> comm) {
        State own = train(of, comm);
        if (comm->rank() == 0) got = std::move(own);
      },
      options);
  ASSERT_EQ(got.size(), expected.size());
  const double tolerance = of.fsdp.mixed_precision.param_dtype ? 2e-2 : 1e-4;
  for (const auto& [name, value] : expected)
    EXPECT_TRUE(torch::allclose(got.at(name), value, tolerance, tolerance))
        << name << " differs by " << (got.at(name) - value).abs().max();
}

}  // namespace
}  // namespace tessera::gpu_test
