// Chunked reductions between ranks that share no memory, on a thread of their own. Ranks are threads that use TCP.
#include "core/comm/gloo/reduction_pipeline.h"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <atomic>
#include <cstdlib>
#include <future>
#include <limits>
#include <thread>
#include <vector>

#include "core/comm/backends.h"
#include "core/comm/rank_order_sum.h"
#include "tests/comm/stuck_rank.h"
#include "tests/support/reference.h"

namespace tessera::reduction_pipeline_test {
using namespace internal;
namespace {

using namespace testing_support;
using std::chrono::milliseconds;

InitOptions by_tcp(milliseconds timeout = std::chrono::minutes(2)) {
  InitOptions options;
  options.peer_memory = false;
  options.timeout = timeout;
  return options;
}

using Body = std::function<void(std::shared_ptr<Communicator>)>;

// Runs ranks as threads. The first `together` reach each other's memory, as on a host with several ranks among hosts
// with one.
void on_hosts(int world, int together, const Body& body) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world; ++rank)
    ranks.emplace_back([&, rank] {
      const GlooOptions options{"127.0.0.1", std::chrono::minutes(2), /*peer_memory=*/rank < together};
      body(make_gloo_communicator(store, rank, world, options));
    });
  for (std::thread& rank : ranks) rank.join();
}

constexpr int64_t kChunkFloats = kChunkBytes / 4;

// A rank's values: of all magnitudes, so that another order of addition gives another sum.
at::Tensor values(int rank, int64_t numel, at::ScalarType dtype = at::kFloat) {
  constexpr int64_t kPeriod = 4099;  // a prime, so chunks differ
  const at::Tensor random = seeded(100 + rank, [] { return torch::randn({kPeriod}, at::kDouble); });
  const at::Tensor period = at::isFloatingType(dtype) ? random * torch::pow(10.0, torch::arange(kPeriod) % 5 - 2)
                                                      : (random * 10).to(at::kLong);
  return period.to(dtype).repeat({numel / kPeriod + 1}).narrow(0, 0, numel).contiguous();
}

// The expected result: all ranks' values, reduced in rank order in one pass.
at::Tensor reduced(int world, int64_t numel, ReduceOp op, at::ScalarType dtype = at::kFloat) {
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < world; ++rank) parts.push_back(values(rank, numel, dtype));
  const at::Tensor out = torch::empty({numel}, dtype);
  reduce_in_rank_order(out, parts, op);
  return out;
}

// Compares all reductions of a tensor with the expected result.
void expect_definition(int world, int64_t numel, ReduceOp op, at::ScalarType dtype = at::kFloat, int together = 0) {
  SCOPED_TRACE(c10::str(world, " ranks, ", numel, " elements of ", dtype));
  const at::Tensor expected = reduced(world, numel, op, dtype);
  const Body body = [&](std::shared_ptr<Communicator> comm) {
    const int rank = comm->rank();
    const at::Tensor own = values(rank, numel, dtype);
    at::Tensor all = own.clone(), at_root = own.clone();
    comm->all_reduce(all, op).wait();
    EXPECT_TRUE(torch::equal(all, expected));
    comm->reduce(at_root, world - 1, op).wait();
    EXPECT_TRUE(torch::equal(at_root, rank == world - 1 ? expected : own));

    std::vector<int64_t> counts(world, numel / world);  // the last rank has the rest, the first of three none
    counts[world - 1] += numel % world;
    if (world > 2) counts[1] += std::exchange(counts[0], 0);
    int64_t begin = 0;
    for (int i = 0; i < rank; ++i) begin += counts[i];
    at::Tensor full = own.clone(), shard = torch::empty({counts[rank]}, dtype);
    comm->reduce_scatter(shard, full, op, counts).wait();
    EXPECT_TRUE(torch::equal(shard, expected.narrow(0, begin, counts[rank])));
    full = own.clone();  // in place as well
    shard = full.narrow(0, begin, counts[rank]);
    comm->reduce_scatter(shard, full, op, counts).wait();
    EXPECT_TRUE(torch::equal(shard, expected.narrow(0, begin, counts[rank])));
  };
  together > 0 ? on_hosts(world, together, body) : run_ranks(world, body, by_tcp());
}

// ThreadSanitizer is ten times slower, and worlds and dtypes share the same threads.
template <class T>
std::vector<T> unless_sanitized(std::vector<T> all, std::vector<T> some) {
  return std::getenv("TESSERA_TEST_TREES") != nullptr ? some : all;
}

TEST(ReductionPipeline, SumsHaveTheBitsOfOnePassAroundTheBordersOfChunks) {
  for (const int world : unless_sanitized<int>({2, 3, 4, 5}, {2, 3}))
    for (const int64_t beyond : {-1, 0, 1}) expect_definition(world, world * kChunkFloats + beyond, ReduceOp::kAverage);
  for (const int64_t beyond : {-1, 1}) expect_definition(3, 6 * kChunkFloats + beyond, ReduceOp::kAverage);
}

TEST(ReductionPipeline, EveryDtypeThatIsReduced) {
  for (const at::ScalarType dtype : unless_sanitized<at::ScalarType>(
           {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kDouble},
           {at::kLong, at::kBFloat16}))
    expect_definition(3, 3 * kChunkBytes / static_cast<int64_t>(c10::elementSize(dtype)) + 7, ReduceOp::kSum, dtype);
  for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin}) expect_definition(3, 3 * kChunkFloats + 7, op);
}

// Ranks that share memory with some peers add up in wait(); the messages are the same.
TEST(ReductionPipeline, SomeRanksShareAHost) {
  expect_definition(3, 7 * kChunkFloats + 1, ReduceOp::kSum, at::kFloat, /*together=*/2);
  expect_definition(5, 11 * kChunkFloats + 3, ReduceOp::kAverage, at::kBFloat16, /*together=*/3);
}

// The tensor has more chunks than staging has room for, so staging is reused. Each of five ranks has room for 8 chunks
// of each peer.
TEST(ReductionPipeline, StagingIsLessThanWhatComes) {
  const int64_t numel = 11 * kChunkFloats + 5;
  const at::Tensor expected = reduced(5, numel, ReduceOp::kSum);
  run_ranks(
      5,
      [&](std::shared_ptr<Communicator> comm) {
        at::Tensor tensor = values(comm->rank(), numel);
        comm->reduce(tensor, 2).wait();
        if (comm->rank() == 2) {
          EXPECT_TRUE(torch::equal(tensor, expected));
        }
      },
      by_tcp());
}

// The caller's floating-point modes are part of the bits: sums on another thread must flush denormals if the caller
// does.
TEST(ReductionPipeline, SumsAreMadeUnderTheCallersModes) {
  run_ranks(
      2,
      [&](std::shared_ptr<Communicator> comm) {
        constexpr float kSmallest = std::numeric_limits<float>::min();  // of normal numbers
        for (const bool flushes : {true, false}) {
          ASSERT_TRUE(at::globalContext().setFlushDenormal(flushes));
          at::Tensor tensor =
              torch::full({2 * kChunkFloats}, comm->rank() == 0 ? 1.5f * kSmallest : -1.25f * kSmallest);
          comm->all_reduce(tensor).wait();
          const at::Tensor bits = tensor.view(at::kInt);
          EXPECT_EQ(bits[0].item<int>() == 0, flushes);
          EXPECT_EQ(bits[-1].item<int>() == 0, flushes);
        }
      },
      by_tcp());
}

// Rank 1 has its result before rank 0 waits for its own.
TEST(ReductionPipeline, GoesOnWithoutTheRanksThread) {
  std::promise<void> others_have_theirs;
  auto theirs = others_have_theirs.get_future();
  run_ranks(
      2,
      [&](std::shared_ptr<Communicator> comm) {
        at::Tensor first = torch::ones({3 * kChunkFloats}), second = torch::full({5 * kChunkFloats}, 2.0f);
        Pending one = comm->all_reduce(first), other = comm->all_reduce(second);
        if (comm->rank() == 0) theirs.wait();
        other.wait();
        one.wait();
        if (comm->rank() == 1) others_have_theirs.set_value();
        EXPECT_TRUE(first.eq(2).all().item<bool>());
        EXPECT_TRUE(second.eq(4).all().item<bool>());
        EXPECT_EQ(comm->traffic().sent_bytes, 8 * kChunkBytes);
      },
      by_tcp(std::chrono::seconds(60)));
}

TEST(ReductionPipeline, OthersGetTheirSumsOfAnOperationThatARankForgets) {
  run_ranks(
      3,
      [&](std::shared_ptr<Communicator> comm) {
        at::Tensor sum = torch::ones({4 * kChunkFloats});
        Pending pending = comm->all_reduce(sum);
        if (comm->rank() == 0) {
          pending = {};
        } else {
          pending.wait();
          EXPECT_TRUE(sum.eq(3).all().item<bool>());
        }
        comm->barrier();
      },
      by_tcp(std::chrono::seconds(60)));
}

TEST(ReductionPipeline, OperationsOfAllKindsInFlight) {
  constexpr int kWorld = 3;
  const int64_t part = kChunkFloats + 3, numel = kWorld * part;
  const at::Tensor expected = reduced(kWorld, numel, ReduceOp::kSum);
  run_ranks(
      kWorld,
      [&](std::shared_ptr<Communicator> comm) {
        const int rank = comm->rank();
        const at::Tensor own = values(rank, numel);
        for (const bool in_order : {true, false}) {
          std::vector<Pending> pending;
          std::vector<at::Tensor> sums, shards, fulls, broadcasts, smalls;
          for (int i = 0; i < 2; ++i) {
            sums.push_back(own.clone());
            pending.push_back(comm->all_reduce(sums.back()));
            fulls.push_back(torch::empty({numel}));
            pending.push_back(comm->all_gather(fulls.back(), own.narrow(0, 0, part)));
            shards.push_back(torch::empty({part}));
            pending.push_back(comm->reduce_scatter(shards.back(), own.clone()));
            broadcasts.push_back(own.clone());
            pending.push_back(comm->broadcast(broadcasts.back(), i));
            smalls.push_back(torch::ones({3}));
            pending.push_back(comm->all_reduce(smalls.back()));
            sums.push_back(own.clone());
            pending.push_back(comm->reduce(sums.back(), i));
          }
          if (!in_order) std::reverse(pending.begin(), pending.end());
          for (Pending& handle : pending) handle.wait();
          for (int i = 0; i < 2; ++i) {
            EXPECT_TRUE(torch::equal(sums[2 * i], expected));
            EXPECT_TRUE(torch::equal(sums[2 * i + 1], rank == i ? expected : own));
            EXPECT_TRUE(torch::equal(shards[i], expected.narrow(0, rank * part, part)));
            for (int peer = 0; peer < kWorld; ++peer)
              EXPECT_TRUE(torch::equal(fulls[i].narrow(0, peer * part, part), values(peer, numel).narrow(0, 0, part)));
            EXPECT_TRUE(torch::equal(broadcasts[i], values(i, numel)));
            EXPECT_EQ(smalls[i].sum().item<float>(), 9.0f);
          }
        }
      },
      by_tcp());
}

TEST(ReductionPipeline, AStuckRankEndsTheWaitByNameWithinTheTimeout) {
  const std::string thrown = error_beside_a_stuck_rank(by_tcp(milliseconds(1500)), [](Communicator& comm) {
    comm.all_reduce(torch::ones({9 * kChunkFloats}), ReduceOp::kSum, "unit 'blocks.3'").wait();
  });
  expect_contains(thrown, "all-reduce of unit 'blocks.3'");
  expect_contains(thrown, "1.5 s");
  expect_contains(thrown, "rank 1");
}

// Rank 0 waits for a sum, rank 2 has one in flight, and rank 1 leaves before its part is complete.
TEST(ReductionPipeline, ARankThatLeavesInTheMiddleEndsWaitsAndWhatIsUnderWay) {
  const std::string thrown = error_of<std::runtime_error>([&] {
    run_ranks(
        3,
        [&](std::shared_ptr<Communicator> comm) {
          std::vector<at::Tensor> tensors;
          std::vector<Pending> pending;
          for (int i = 0; i < (comm->rank() == 1 ? 1 : 3); ++i) {
            tensors.push_back(torch::ones({6 * kChunkFloats}));
            pending.push_back(comm->all_reduce(tensors.back(), ReduceOp::kSum, "unit " + std::to_string(i)));
          }
          if (comm->rank() == 1) throw std::runtime_error("the disk of rank 1 is on fire");
          for (Pending& handle : pending) {
            const std::string text = error_of<CommError>([&] { handle.wait(); });
            if (!text.empty()) expect_contains(text, "the disk of rank 1 is on fire");
          }
          throw std::runtime_error("told");
        },
        by_tcp(std::chrono::seconds(60)));
  });
  EXPECT_EQ(thrown, "the disk of rank 1 is on fire");
}

// The error names the peer whose connection is closed, even if the first announcement finds it.
TEST(ReductionPipeline, NamesThePeerThatAnAnnouncementFailsFor) {
  const at::Tensor tensor = torch::ones({kChunkFloats});
  ReductionPipeline pipeline(0, 4, {tensor}, tensor, ReduceOp::kSum,
                             {.receive = [](const at::Tensor&, int peer) -> ReductionPipeline::Message {
                                if (peer == 2) throw std::runtime_error("closed");
                                return nullptr;
                              },
                              .publish = nullptr});
  const auto failure = pipeline.announce();
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->peer, 2);
  EXPECT_FALSE(failure->is_send);
  EXPECT_EQ(failure->cause, "closed");
}

// From another thread, during this rank's wait for a sum, and during its computation.
TEST(ReductionPipeline, AbortEndsWhatIsUnderWay) {
  for (const bool waits : {true, false}) {
    std::atomic<int> told = 0;
    run_ranks(
        2,
        [&](std::shared_ptr<Communicator> comm) {
          at::Tensor tensor = torch::ones({8 * kChunkFloats});
          if (comm->rank() == 0) {
            Pending pending = comm->all_reduce(tensor, ReduceOp::kSum, "unit 'a'");
            std::thread aborter([&] { comm->abort("out of paper"); });
            if (!waits) aborter.join();
            expect_contains(error_of<CommError>([&] { pending.wait(); }), "out of paper");
            if (waits) aborter.join();
            tensor.zero_();  // no other thread uses it
            EXPECT_EQ(tensor.sum().item<float>(), 0.0f);
            expect_contains(error_of<CommError>([&] { comm->barrier(); }), "out of paper");
          } else {
            expect_contains(error_of<CommError>([&] { comm->barrier("the end"); }), "out of paper");
          }
          ++told;
        },
        by_tcp(std::chrono::seconds(60)));
    EXPECT_EQ(told, 2);
  }
}

}  // namespace
}  // namespace tessera::reduction_pipeline_test

#ifdef __SANITIZE_THREAD__
// A rank that gives up a message waits until gloo's thread has released it, on an atomic inside libtorch
// (tools/cmake/sanitizers/tsan.supp). Its staging then returns to the memory cache, and gloo's thread of another group
// may write there next. So both stacks of the report have only this frame. Not in the suppression file: other programs
// must find tensors that are accessed during a receive.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions() {
  return "race:gloo::transport::tcp::Pair::read\n";
}
#endif
