// Tests InitOptions::rank_order_sums: reductions equal gloo's bitwise, although the backend adds in another order.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <map>
#include <mutex>
#include <thread>

#include "core/comm/nccl/rank_order_reduction.h"
#include "tests/accelerator/collectives.h"
#include "tests/accelerator/simulated_training.h"

namespace tessera::rank_order_test {
using namespace internal;
namespace {

using namespace accelerator_training;
using accelerator::on_devices;
using accelerator::Simulation;
using collectives::reduce_all;
using collectives::Results;
using testing_support::error_of;
using testing_support::expect_contains;

const InitOptions kInRankOrder{.timeout = std::chrono::seconds(60), .rank_order_sums = true};
using Body = std::function<Results(Communicator& comm)>;

// Returns the names of the results that are not bitwise equal to gloo's on some rank.
std::string differences(int world, const Body& body, const InitOptions& options) {
  std::mutex mutex;
  std::map<int, Results> expected, got;
  const auto into = [&](std::map<int, Results>& all) {
    return [&](std::shared_ptr<Communicator> comm) {
      Results results = body(*comm);
      std::lock_guard lock(mutex);
      all[comm->rank()] = std::move(results);
    };
  };
  run_ranks(world, into(expected));
  on_devices(world, into(got), options);
  std::string text;
  for (const auto& [rank, results] : expected)
    for (const auto& [name, value] : results)
      if (!torch::equal(value, got[rank].at(name))) text += c10::str("rank ", rank, ", ", name, "; ");
  return text;
}

TEST(RankOrder, EveryReductionHasTheBitsOfGloo) {
  for (int world = 1; world <= 5; ++world) {
    SCOPED_TRACE(world);
    const Simulation simulation({.sums_by_ring = true});
    EXPECT_EQ(differences(world, reduce_all, kInRankOrder), "");
    for (const std::string& finding : Simulation::findings()) ADD_FAILURE() << finding;
  }
}

TEST(RankOrder, ARingHasOtherBits) {
  accelerator::needs_simulation("another order");
  const Simulation simulation({.sums_by_ring = true});
  expect_contains(differences(3, reduce_all, {}), "Float by 0: all-reduce of 67");
}

// Reduces more elements than fit into the staging memory, which several reductions in flight share.
TEST(RankOrder, ExchangesLargeTensorsInPieces) {
  constexpr int64_t kNumel = 2 * RankOrderReduction::kStagingBytes / 8 + 3;
  accelerator::needs_simulation("the memory of each device");
  const Simulation simulation({.longest_delay_us = 0});
  on_devices(
      2,
      [&](std::shared_ptr<Communicator> comm) {
        at::Tensor x =
            torch::arange(kNumel, at::TensorOptions(comm->device()).dtype(at::kInt)).to(at::kFloat) + comm->rank();
        at::Tensor y = x.clone();
        const at::Tensor expected = (2 * x.cpu() + (1 - 2 * comm->rank()));
        const int64_t before = accelerator::reserved_bytes(comm->device().index());
        auto of_x = comm->reduce(x, 0, ReduceOp::kSum, "x");
        auto of_y = comm->all_reduce(y, ReduceOp::kSum, "y");
        of_x.wait();
        of_y.wait();
        EXPECT_TRUE(torch::equal(comm->to_host(comm->rank() == 0 ? x : y, "x"), expected));
        EXPECT_TRUE(torch::equal(comm->to_host(y, "y"), expected));
        const int64_t taken = accelerator::reserved_bytes(comm->device().index()) - before;
        EXPECT_LE(taken, RankOrderReduction::kStagingBytes + (1 << 20));
      },
      kInRankOrder);
  for (const std::string& finding : Simulation::findings()) ADD_FAILURE() << finding;
}

// Each wrapper reduces different tensors, which are divided at different boundaries.
TEST(RankOrder, WrappersTrainToEqualBits) {
  const std::vector<Case> cases = {
      {.name = "ddp", .wrapper = Case::kDdp, .world = 3},
      {.name = "sdp", .wrapper = Case::kSdp, .world = 3},
      {.name = "fsdp", .world = 3},
      {.name = "fsdp on a side stream", .world = 3, .side_stream = true},
      {.name = "fsdp and no wait", .world = 3, .fsdp = {.prefetch = 2}, .accumulates = false},
  };
  const Simulation simulation({.sums_by_ring = true});
  const State first = train_on_devices(cases[0], kInRankOrder);
  for (const Case& of : cases) {
    SCOPED_TRACE(of.name);
    EXPECT_EQ(difference(first, train_on_devices(of, kInRankOrder)), "");
  }
  if (!accelerator::on_gpus()) {
    EXPECT_EQ(difference(train_on_gloo(cases[0]), first), "");
    EXPECT_NE(difference(first, train_on_devices(cases[0])), "");
  }
  for (const std::string& finding : Simulation::findings()) ADD_FAILURE() << finding;
}

// Tests 16-bit gradients, which are sent in 16 bits, and reductions in subgroups.
TEST(RankOrder, OtherDtypesAndGroupsHaveTheBitsOfGloo) {
  accelerator::needs_simulation("the bits of a CPU's kernels");
  static const MixedPrecision bf16{.param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16};
  const Case in_bf16{.name = "bf16", .world = 3, .fsdp = {.mixed_precision = bf16}, .clips = true};
  const Simulation simulation({.sums_by_ring = true});
  for (const Case& of : {in_bf16, case_named("fsdp_hybrid"), case_named("sdp_unused_on_a_rank")}) {
    SCOPED_TRACE(of.name);
    EXPECT_EQ(difference(train_on_gloo(of), train_on_devices(of, kInRankOrder)), "");
  }
  for (const std::string& finding : Simulation::findings()) ADD_FAILURE() << finding;
}

TEST(RankOrder, NamesRanksWithoutTheOption) {
  const Simulation simulation;
  accelerator::needs_devices(2);
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::string errors[2];
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank)
    ranks.emplace_back([&, rank] {
      const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(rank));
      const c10::DeviceGuard guard(device);
      auto comm = make_nccl_communicator(accelerator::device_groups(), store, rank, 2, device,
                                         {.timeout = std::chrono::seconds(60), .rank_order_sums = rank == 0});
      at::Tensor x = torch::ones({8}, device);
      errors[rank] = error_of<CommError>([&] {
        comm->all_reduce(x, ReduceOp::kSum, "x").wait();
        comm->throw_if_aborted("x");
      });
    });
  for (std::thread& rank : ranks) rank.join();
  for (const std::string& error : errors) {
    expect_contains(error, "the ranks have diverged: operation #0 is ");
    expect_contains(error, "all-reduce of x in rank order (8 elements) on rank 0");
  }
}

TEST(RankOrder, AFailureOfTheExchangeEndsAllRanks) {
  const Simulation simulation({.fails = [](int device, std::string_view what) {
    return device == 1 && what.starts_with("all-to-all") ? "NCCL error: link down" : "";
  }});
  std::mutex mutex;
  std::map<int, std::string> errors;
  error_of<std::exception>([&] {
    on_devices(
        3,
        [&](std::shared_ptr<Communicator> comm) {
          at::Tensor x = torch::ones({8}, comm->device());
          const std::string error = error_of<CommError>([&] {
            comm->all_reduce(x, ReduceOp::kSum, "x").wait();
            comm->throw_if_aborted("x");
          });
          std::lock_guard lock(mutex);
          errors[comm->rank()] = error;
        },
        kInRankOrder);
  });
  expect_contains(errors[1], "all-reduce of x in rank order (8 elements) failed on rank 1 of 3: NCCL error: link down");
  for (const int rank : {0, 2}) expect_contains(errors[rank], "rank 1 failed: ");
}

}  // namespace
}  // namespace tessera::rank_order_test
