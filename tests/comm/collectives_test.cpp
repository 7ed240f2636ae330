// Compares collectives with closed forms. Ranks are threads.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <ATen/CPUGeneratorImpl.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <functional>
#include <numeric>
#include <random>

#include "core/comm/library_collectives.h"
#include "core/comm/reduced_report.h"
#include "tests/comm/stuck_rank.h"
#include "tests/support/reference.h"

namespace tessera::collectives_test {
using namespace internal;
namespace {

using namespace testing_support;
using std::chrono::milliseconds;

// The value of rank `rank` at position i: a small integer, so that sums are exact in every dtype.
at::Tensor numbers(int rank, int64_t numel, at::ScalarType dtype = at::kFloat) {
  return (torch::arange(numel) % 7 + rank).to(dtype);
}

at::Tensor summed(int world, int64_t numel, at::ScalarType dtype = at::kFloat) {
  at::Tensor sum = torch::zeros({numel});
  for (int rank = 0; rank < world; ++rank) sum += numbers(rank, numel);
  return sum.to(dtype);
}

// By peer memory, or by TCP.
std::vector<InitOptions> transports() {
  InitOptions in_memory, by_tcp;
  by_tcp.peer_memory = false;
  return {in_memory, by_tcp};
}

// Runs ranks as threads.
void over_each_transport(int world, const std::function<void(std::shared_ptr<Communicator>)>& body) {
  for (const InitOptions& options : transports()) {
    SCOPED_TRACE(options.peer_memory ? "in memory" : "by TCP");
    run_ranks(world, body, options);
  }
}

// The shard sizes that each group runs its collectives with.
constexpr int64_t kNumels[] = {0, 1, 5, 1000, 70001};

class Collectives : public testing::TestWithParam<int> {
 protected:
  int world() const { return GetParam(); }

  void over_each_transport_and_numel(const std::function<void(std::shared_ptr<Communicator>, int64_t)>& body) const {
    over_each_transport(world(), [&](std::shared_ptr<Communicator> comm) {
      for (int64_t numel : kNumels) {
        SCOPED_TRACE("numel " + std::to_string(numel));
        body(comm, numel);
      }
    });
  }
};

INSTANTIATE_TEST_SUITE_P(Worlds, Collectives, testing::Values(1, 2, 3, 4, 5),
                         [](const auto& instance) { return "world" + std::to_string(instance.param); });

// Rank a sends a + 2 b elements to b.
TEST_P(Collectives, AllToAllBringsEachRankItsParts) {
  over_each_transport_and_numel([&](std::shared_ptr<Communicator> comm, int64_t numel) {
    if (numel > 1000) return;
    auto count = [&](int from, int to) { return numel == 0 ? 0 : from + 2 * to; };
    std::vector<int64_t> sends, receives;
    std::vector<at::Tensor> sent{torch::empty({0})}, expected{torch::empty({0})};
    for (int peer = 0; peer < world(); ++peer) {
      sends.push_back(count(comm->rank(), peer));
      receives.push_back(count(peer, comm->rank()));
      sent.push_back(torch::full({sends.back()}, 10.0f * comm->rank() + peer));
      expected.push_back(torch::full({receives.back()}, 10.0f * peer + comm->rank()));
    }
    const at::Tensor whole = torch::cat(expected);
    at::Tensor received = torch::full({whole.numel()}, -1.0f);
    comm->all_to_all(received, torch::cat(sent), receives, sends, "parts").wait();
    EXPECT_TRUE(torch::equal(received, whole));
    EXPECT_THROW(static_cast<void>(comm->all_to_all(received, torch::cat(sent), {}, sends)), std::invalid_argument);
  });
}

TEST_P(Collectives, AllGatherPutsShardsInRankOrder) {
  over_each_transport_and_numel([&](std::shared_ptr<Communicator> comm, int64_t numel) {
    at::Tensor full = torch::full({world() * numel}, -1.0f);
    comm->all_gather(full, numbers(comm->rank(), numel)).wait();
    for (int rank = 0; rank < world(); ++rank)
      EXPECT_TRUE(torch::equal(full.narrow(0, rank * numel, numel), numbers(rank, numel)));
  });
}

TEST_P(Collectives, AllGatherInPlace) {
  over_each_transport_and_numel([&](std::shared_ptr<Communicator> comm, int64_t numel) {
    at::Tensor full = torch::full({world() * numel}, -1.0f);
    at::Tensor own = full.narrow(0, comm->rank() * numel, numel);
    own.copy_(numbers(comm->rank(), numel));
    comm->all_gather(full, own).wait();
    for (int rank = 0; rank < world(); ++rank)
      EXPECT_TRUE(torch::equal(full.narrow(0, rank * numel, numel), numbers(rank, numel)));
  });
}

TEST_P(Collectives, ReduceScatterGivesEachRankItsPart) {
  over_each_transport_and_numel([&](std::shared_ptr<Communicator> comm, int64_t numel) {
    at::Tensor shard = torch::full({numel}, -1.0f);
    comm->reduce_scatter(shard, numbers(comm->rank(), world() * numel)).wait();
    EXPECT_TRUE(torch::equal(shard, summed(world(), world() * numel).narrow(0, comm->rank() * numel, numel)));
  });
}

// Pieces give the same bits as one tensor, and are not written.
TEST_P(Collectives, ReduceScatterOfPiecesIsThatOfAllOfThem) {
  constexpr int64_t kMostNumel = 600'000;  // more than one TCP chunk
  std::vector<std::vector<int64_t>> cuts{{0, 5, 0}, {1, 2, 3, 4}, {70001, 1, 300'000, 64, 2}};
  std::mt19937 random(static_cast<unsigned>(world()));
  for (int round = 0; round < 6; ++round) {
    cuts.emplace_back();
    for (size_t i = 0; i < 2 + random() % 5; ++i)
      cuts.back().push_back(random() % 4 == 0 ? random() % 3 : random() % (kMostNumel / 6));
  }
  over_each_transport(world(), [&](std::shared_ptr<Communicator> comm) {
    at::Generator draws = at::make_generator<at::CPUGeneratorImpl>(100 + comm->rank());
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kLong}) {
      const ReduceOp op = dtype == at::kLong ? ReduceOp::kMax : ReduceOp::kAverage;
      for (std::vector<int64_t> numels : cuts) {
        const int64_t sum = std::accumulate(numels.begin(), numels.end(), int64_t{0});
        numels.push_back((world() - sum % world()) % world());
        const int64_t shard_numel = (sum + numels.back()) / world();
        const at::Tensor full = (100 * torch::randn({world() * shard_numel}, draws)).to(dtype);
        std::vector<at::Tensor> pieces;
        for (const at::Tensor& piece : full.split_with_sizes(numels)) pieces.push_back(piece.clone());
        const at::Tensor shard = torch::zeros({shard_numel}, dtype), expected = torch::zeros_like(shard);
        Pending of_pieces = reduce_scatter_pieces(*comm, shard, pieces, op, "pieces");
        comm->reduce_scatter(expected, full.clone(), op, {}, "all").wait();
        of_pieces.wait();
        EXPECT_TRUE(torch::equal(shard, expected)) << c10::Join(" ", numels) << " " << dtype;
        EXPECT_TRUE(torch::equal(torch::cat(pieces), full));
      }
    }
    EXPECT_EQ(exchanges_pieces(*comm), world() > 1);
  });
}

TEST(CollectiveTransports, MoveOnlyWhenAwaitedWhereAllRanksReadEachOthersMemory) {
  for (const InitOptions& options : transports())
    for (const int world : {1, 2, 3})
      run_ranks(
          world,
          [&](std::shared_ptr<Communicator> comm) {
            EXPECT_EQ(comm->is_lazy(1 << 20), options.peer_memory && world > 1);
            EXPECT_FALSE(comm->is_lazy(1 << 16));  // a round
          },
          options);
}

TEST(CollectivesErrors, ATimeoutThatNoClockCanHoldIsRefused) {
  for (const milliseconds timeout : {milliseconds(0), milliseconds(-1), milliseconds::max()})
    expect_contains(error_of<std::invalid_argument>(
                        [&] { run_ranks(2, [](std::shared_ptr<Communicator>) {}, {.timeout = timeout}); }),
                    "run_ranks: InitOptions::timeout is " + std::to_string(timeout.count()));
}

TEST(CollectivesErrors, ABackendThatDoesNotFitTheDeviceIsRefused) {
  for (const InitOptions& options :
       {InitOptions{.backend = "nccl", .device = at::kCPU}, InitOptions{.backend = "gloo", .device = at::kCUDA},
        InitOptions{.device = at::Device(at::kCUDA, 0)}})
    expect_contains(
        error_of<std::invalid_argument>([&] { run_ranks(2, [](std::shared_ptr<Communicator>) {}, options); }),
        "run_ranks: ");
}

TEST(CollectivesErrors, EmptyFunctionsAreRefused) {
  expect_contains(error_of<std::invalid_argument>([] { run_ranks(2, nullptr); }), "run_ranks: the body is empty");
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    expect_contains(error_of<std::invalid_argument>([&] { comm->split_by(nullptr); }), "split_by: color_of is empty");
  });
}

TEST(CollectivesErrors, PiecesThatAreNotOfOneTensor) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    const at::Tensor shard = torch::zeros({3});
    auto error = [&](std::vector<at::Tensor> pieces) {
      return error_of<std::invalid_argument>(
          [&] { reduce_scatter_pieces(*comm, shard, pieces, ReduceOp::kSum, "w").wait(); });
    };
    expect_contains(error({torch::zeros({2}), torch::zeros({3})}), "pieces have 5 elements, expected 6");
    expect_contains(error({torch::zeros({2}), torch::zeros({4}, at::kDouble)}), "expected one dtype");
    expect_contains(error({torch::zeros({2}), torch::zeros({8}).slice(0, 0, 8, 2)}), "not contiguous");
    expect_contains(error({torch::zeros({2}), at::Tensor()}), "undefined");
    comm->barrier();
  });
}

// Data moves as bytes.
TEST(CollectivesErrors, AConjugateOrNegativeBitIsRefused) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    const at::Tensor negative = at::_neg_view(torch::ones({2})), full = torch::zeros({4});
    const at::Tensor conjugate = torch::ones({2}, at::kComplexFloat).conj();
    for (const auto& error :
         {error_of<std::invalid_argument>([&] { comm->all_gather(full, negative, {}, "w").wait(); }),
          error_of<std::invalid_argument>([&] { comm->reduce_scatter(full.narrow(0, 0, 1), negative).wait(); }),
          error_of<std::invalid_argument>([&] { comm->broadcast(conjugate).wait(); })})
      expect_contains(error, "on rank " + std::to_string(comm->rank()) + ": ");
    expect_contains(error_of<std::invalid_argument>([&] { comm->all_reduce(negative).wait(); }),
                    "the tensor has a conjugate or negative bit");
    comm->broadcast(conjugate.clone()).wait();
  });
}

TEST_P(Collectives, UnevenAndEmptyParts) {
  over_each_transport_and_numel([&](std::shared_ptr<Communicator> comm, int64_t numel) {
    std::vector<int64_t> counts;  // 0 for rank 0, and more for each next rank
    int64_t total = 0, begin = 0;
    for (int rank = 0; rank < world(); ++rank) {
      if (rank == comm->rank()) begin = total;
      counts.push_back(rank * numel);
      total += counts.back();
    }
    at::Tensor shard = torch::full({counts[comm->rank()]}, -1.0f);
    comm->reduce_scatter(shard, numbers(comm->rank(), total), ReduceOp::kSum, counts).wait();
    EXPECT_TRUE(torch::equal(shard, summed(world(), total).narrow(0, begin, shard.numel())));
    at::Tensor full = torch::full({total}, -1.0f);
    comm->all_gather(full, shard, counts).wait();
    EXPECT_TRUE(torch::equal(full, summed(world(), total)));
  });
}

TEST_P(Collectives, AllReduceInEveryOpAndDtype) {
  over_each_transport_and_numel([&](std::shared_ptr<Communicator> comm, int64_t numel) {
    for (at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong}) {
      at::Tensor sum = numbers(comm->rank(), numel, dtype);
      comm->all_reduce(sum).wait();
      EXPECT_TRUE(torch::equal(sum, summed(world(), numel, dtype))) << dtype;
    }
    at::Tensor average = numbers(comm->rank(), numel);
    comm->all_reduce(average, ReduceOp::kAverage).wait();
    EXPECT_TRUE(torch::equal(average, summed(world(), numel) / world()));
    at::Tensor most = numbers(comm->rank(), numel);
    comm->all_reduce(most, ReduceOp::kMax).wait();
    EXPECT_TRUE(torch::equal(most, numbers(world() - 1, numel)));
    at::Tensor least = numbers(comm->rank(), numel);
    comm->all_reduce(least, ReduceOp::kMin).wait();
    EXPECT_TRUE(torch::equal(least, numbers(0, numel)));
  });
}

TEST_P(Collectives, RootedOperationsFromEveryRoot) {
  over_each_transport_and_numel([&](std::shared_ptr<Communicator> comm, int64_t numel) {
    for (int root = 0; root < world(); ++root) {
      at::Tensor sent = numbers(comm->rank(), numel);
      comm->broadcast(sent, root).wait();
      EXPECT_TRUE(torch::equal(sent, numbers(root, numel)));

      at::Tensor reduced = numbers(comm->rank(), numel);
      comm->reduce(reduced, root).wait();
      EXPECT_TRUE(torch::equal(reduced, comm->rank() == root ? summed(world(), numel) : numbers(comm->rank(), numel)));

      at::Tensor shard = torch::full({numel}, -1.0f);
      at::Tensor full = comm->rank() == root ? numbers(root, world() * numel) : at::Tensor();
      comm->scatter(shard, full, root).wait();
      EXPECT_TRUE(torch::equal(shard, numbers(root, world() * numel).narrow(0, comm->rank() * numel, numel)));
    }
  });
}

// Floating-point sums depend on the order, which must be rank order in every operation.
TEST(CollectivesOrder, SumsAreTakenInRankOrder) {
  for (int world : {2, 3, 4, 5}) {
    for (int64_t numel : {60, 60000}) {
      at::Tensor expected;
      for (int rank = 0; rank < world; ++rank) {
        torch::manual_seed(rank);
        at::Tensor values = torch::randn({numel});
        expected = rank == 0 ? values : expected + values;
      }
      over_each_transport(world, [&](std::shared_ptr<Communicator> comm) {
        static std::mutex seeding;
        at::Tensor values;
        {
          std::lock_guard lock(seeding);
          torch::manual_seed(comm->rank());
          values = torch::randn({numel});
        }
        const int64_t part = numel / world;
        at::Tensor shard = torch::empty({part});
        comm->reduce_scatter(shard, values).wait();
        EXPECT_TRUE(torch::equal(shard, expected.narrow(0, comm->rank() * part, part)));
        comm->all_reduce(values).wait();
        EXPECT_TRUE(torch::equal(values, expected));
      });
    }
  }
}

TEST(CollectivesOrder, SixteenBitSumsAreRoundedOnce) {
  over_each_transport(3, [](std::shared_ptr<Communicator> comm) {
    // 256 + 1 is 256 in bfloat16, so rounding after each addition would lose both ones.
    at::Tensor value = torch::full({4}, comm->rank() == 0 ? 256.0f : 1.0f).to(at::kBFloat16);
    comm->all_reduce(value).wait();
    EXPECT_TRUE(torch::equal(value, torch::full({4}, 258.0f).to(at::kBFloat16)));
  });
}

TEST(CollectivesAsync, ManyInFlightAndWaitedInAnyOrder) {
  over_each_transport(3, [](std::shared_ptr<Communicator> comm) {
    std::vector<at::Tensor> fulls, shards, sums;
    std::vector<Pending> pending;
    for (int i = 0; i < 20; ++i) {
      fulls.push_back(torch::empty({3 * (i + 1)}));
      pending.push_back(comm->all_gather(fulls.back(), torch::full({i + 1}, 10.0f * comm->rank() + i)));
      sums.push_back(torch::full({i * 5000 + 1}, static_cast<float>(comm->rank())));
      pending.push_back(comm->all_reduce(sums.back()));
    }
    for (auto handle = pending.rbegin(); handle != pending.rend(); ++handle) handle->wait();
    for (int i = 0; i < 20; ++i) {
      EXPECT_TRUE(torch::equal(sums[i], torch::full({i * 5000 + 1}, 3.0f)));
      EXPECT_EQ(fulls[i][-1].item<float>(), 20.0f + i);
    }
  });
}

TEST(CollectivesAsync, HandlesKeepTensorsAlive) {
  over_each_transport(2, [](std::shared_ptr<Communicator> comm) {
    at::Tensor full = torch::empty({2 << 20});
    Pending pending = comm->all_gather(full, torch::full({1 << 20}, comm->rank() + 1.0f));  // the shard is a temporary
    at::Tensor noise = torch::full({1 << 20}, -1.0f);
    pending.wait();
    EXPECT_EQ(full.sum().item<float>(), 3.0f * (1 << 20));
  });
}

TEST(CollectivesAsync, DroppedHandlesDoNotHarmTheOthers) {
  over_each_transport(3, [](std::shared_ptr<Communicator> comm) {
    { Pending dropped = comm->all_gather(torch::empty({3 << 18}), torch::zeros({1 << 18})); }
    at::Tensor sum = torch::ones({1000});
    comm->all_reduce(sum).wait();
    EXPECT_EQ(sum.sum().item<float>(), 3000.0f);
    comm->barrier();
  });
}

TEST(CollectivesTraffic, EachRankSendsNoMoreThanItMust) {
  over_each_transport(4, [](std::shared_ptr<Communicator> comm) {
    const int64_t shard_bytes = 1 << 20;
    at::Tensor full = torch::empty({4 * shard_bytes / 4}), shard = torch::zeros({shard_bytes / 4});
    comm->all_gather(full, shard).wait();
    EXPECT_EQ(comm->traffic().sent_bytes, 3 * shard_bytes);
    comm->reduce_scatter(shard, full).wait();
    EXPECT_EQ(comm->traffic().sent_bytes, 6 * shard_bytes);
    comm->all_reduce(full).wait();
    EXPECT_EQ(comm->traffic().sent_bytes, 12 * shard_bytes);
    EXPECT_EQ(comm->traffic().collectives, 3);
  });
}

// An agreement costs each rank as many messages as the number of ranks has bits.
TEST(CollectivesTraffic, LargestIntegersSpreadByDoubling) {
  for (const int world : {3, 8, 9, 16, 21}) {
    SCOPED_TRACE(world);
    over_each_transport(world, [&](std::shared_ptr<Communicator> comm) {
      const int rank = comm->rank();
      const at::Tensor own = torch::tensor({rank, -rank, (rank * 5 + 3) % world, 5}, torch::kLong);
      const at::Tensor largest = own.clone(), smallest = own.clone();
      comm->all_reduce(largest, ReduceOp::kMax).wait();
      const int64_t sent = comm->traffic().sent_bytes;
      comm->all_reduce(smallest, ReduceOp::kMin).wait();
      EXPECT_TRUE(torch::equal(largest, torch::tensor({world - 1, 0, world - 1, 5}, torch::kLong))) << largest;
      EXPECT_TRUE(torch::equal(smallest, torch::tensor({0, 1 - world, 0, 5}, torch::kLong))) << smallest;
      const int64_t messages = world <= 8 ? world - 1 : world <= 16 ? 4 : 5;
      EXPECT_EQ(sent, messages * 32);
    });
  }
}

TEST(ReducedReport, NamesTheLowestOfThoseWhoDiffer) {
  for (const int world : {2, 5, 12})
    for (const int odd : {0, 1, world - 1}) {
      run_ranks(world, [&](std::shared_ptr<Communicator> comm) {
        const int rank = comm->rank();
        ReducedReport alike(*comm, 7, {rank, 3}, "a test");
        alike.finish();
        EXPECT_FALSE(alike.unlike_ranks());
        EXPECT_EQ(alike.largest()[0], world - 1);
        EXPECT_EQ(alike.largest()[1], 3);
        // Differs only in the highest of 64 bits.
        ReducedReport other(*comm, 7 + (rank == odd ? uint64_t{1} << 63 : 0), {}, "a test");
        other.finish();
        ASSERT_TRUE(other.unlike_ranks());
        EXPECT_EQ(*other.unlike_ranks(), odd == 0 ? std::pair(0, 1) : std::pair(0, odd));
        expect_contains(error_of<std::invalid_argument>([&] { other.require_alike("a test"); }),
                        c10::str("the ranks disagree about a test: ranks 0 and ", odd == 0 ? 1 : odd, " did not"));
      });
    }
}

// In a forked process with lower limits.
TEST(CollectivesErrors, TooFewDescriptorsAreAnErrorBeforeAnythingIsStarted) {
  InitOptions by_tcp;
  by_tcp.peer_memory = false;
  const pid_t child = ::fork();
  if (child == 0) {
    rlimit limit{64, 256};
    if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) ::_exit(1);
    const auto soft_limit = [] {
      rlimit now{};
      ::getrlimit(RLIMIT_NOFILE, &now);
      return now.rlim_cur;
    };
    const auto body = [&](const auto& comm) {
      comm->barrier();
      if (soft_limit() <= 64) ::_exit(2);
    };
    run_ranks(5, body, by_tcp);  // needs more than 64: the soft limit is raised meanwhile
    if (soft_limit() != 64) ::_exit(5);
    std::atomic<int> started = 0;
    try {
      run_ranks(12, [&](const auto&) { ++started; }, by_tcp);
    } catch (const CommError& error) {
      const std::string text = error.what();
      const bool names_both = text.find("360 descriptors of sockets and files are needed") != std::string::npos &&
                              text.find("(hard limit RLIMIT_NOFILE 256)") != std::string::npos;
      ::_exit(names_both && started == 0 ? 0 : 3);
    }
    ::_exit(4);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(WIFEXITED(status));
}

TEST(CollectivesErrors, BadArgumentsNameThemselvesAndHarmNothing) {
  over_each_transport(2, [](std::shared_ptr<Communicator> comm) {
    at::Tensor three = torch::zeros({3}), four = torch::zeros({4}), two = torch::zeros({2});
    expect_contains(error_of<std::invalid_argument>([&] { comm->all_gather(four, three).wait(); }),
                    "the full tensor has 4 elements, expected 6");
    expect_contains(error_of<std::invalid_argument>([&] { comm->all_gather(four, two, {1, 3}).wait(); }),
                    "the shard has 2");
    expect_contains(error_of<std::invalid_argument>([&] { comm->broadcast(two, 2).wait(); }),
                    "root 2, expected 0 to 1");
    expect_contains(error_of<std::invalid_argument>([&] { comm->all_gather(four, two.to(at::kDouble)).wait(); }),
                    "dtype");
    expect_contains(error_of<std::invalid_argument>([&] { comm->all_reduce(torch::zeros({4, 2}).t()).wait(); }),
                    "contiguous");
    expect_contains(error_of<std::invalid_argument>([&] { comm->all_reduce(at::Tensor()).wait(); }), "undefined");
    comm->all_reduce(two).wait();
  });
}

// A sum of bools is not a bool, and complex numbers have no order. Refused before any data is sent, also in a world of
// one.
TEST(CollectivesErrors, ReductionsRefuseWhatCannotBeReducedAndCopiesDoNot) {
  const std::string unit = "unit 'blocks.3'";
  for (const int world : {1, 2})
    over_each_transport(world, [&](std::shared_ptr<Communicator> comm) {
      for (const at::ScalarType dtype : {at::kBool, at::kComplexFloat, at::kComplexDouble, at::kFloat8_e4m3fn}) {
        at::Tensor two = torch::zeros({2}, dtype), all = torch::zeros({2 * world}, dtype);
        const std::string on =
            " of " + unit + " on rank " + std::to_string(comm->rank()) + ": the tensor is " + c10::toString(dtype);
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
          EXPECT_EQ(error_of<std::invalid_argument>([&] {
                      auto call = comm->all_reduce(two, op, unit);
                    }).find("all-reduce" + on),
                    0U);
          EXPECT_EQ(
              error_of<std::invalid_argument>([&] { auto call = comm->reduce(two, 0, op, unit); }).find("reduce" + on),
              0U);
          EXPECT_EQ(error_of<std::invalid_argument>([&] {
                      auto call = comm->reduce_scatter(two, all, op, {}, unit);
                    }).find("reduce-scatter" + on),
                    0U);
        }
        at::Tensor own = (torch::arange(2) + comm->rank()).to(dtype);
        comm->all_gather(all, own).wait();
        EXPECT_TRUE(torch::equal(all.narrow(0, 0, 2).to(at::kComplexDouble),
                                 torch::arange(2).to(dtype).to(at::kComplexDouble)));
        comm->broadcast(own, world - 1).wait();
        comm->scatter(two, all).wait();
        EXPECT_TRUE(
            torch::equal(two.to(at::kComplexDouble), all.narrow(0, 2 * comm->rank(), 2).to(at::kComplexDouble)));
      }
      expect_contains(error_of<std::invalid_argument>([&] {
                        auto call = comm->all_reduce(torch::zeros({2}, at::kLong), ReduceOp::kAverage, unit);
                      }),
                      "the tensor is Long, expected Half, BFloat16, Float or Double for an average");
      at::Tensor sum = torch::ones({2});
      comm->all_reduce(sum).wait();
      EXPECT_EQ(sum[0].item<int>(), world);
    });
}

TEST(CollectivesErrors, ARankThatThrowsEndsTheOthersSoonByName) {
  for (const InitOptions& options : transports()) {
    const auto began = std::chrono::steady_clock::now();
    std::string seen_by_others;
    std::mutex mutex;
    const std::string thrown = error_of<std::runtime_error>([&] {
      run_ranks(
          3,
          [&](std::shared_ptr<Communicator> comm) {
            if (comm->rank() == 2) throw std::runtime_error("the disk of rank 2 is on fire");
            try {
              comm->all_reduce(torch::zeros({10}), ReduceOp::kSum, "unit 'blocks.3'").wait();
            } catch (const CommError& error) {
              std::lock_guard lock(mutex);
              seen_by_others = error.what();
              throw;
            }
          },
          options);
    });
    EXPECT_EQ(thrown, "the disk of rank 2 is on fire");
    expect_contains(seen_by_others, "all-reduce of unit 'blocks.3'");
    expect_contains(seen_by_others, "rank 2 failed: the disk of rank 2 is on fire");
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(20));
  }
}

TEST(CollectivesErrors, AStuckRankEndsTheWaitWithinTheTimeout) {
  for (InitOptions options : transports()) {
    options.timeout = milliseconds(1500);
    const std::string thrown =
        error_beside_a_stuck_rank(options, [](Communicator& comm) { comm.barrier("the end of the epoch"); });
    expect_contains(thrown, "of the end of the epoch");
    expect_contains(thrown, "1.5 s");
    expect_contains(thrown, "rank 1");
  }
}

TEST(CollectivesErrors, RanksThatDivergeAreToldHowLongBeforeTheTimeout) {
  for (const InitOptions& options : transports()) {
    const auto began = std::chrono::steady_clock::now();
    const std::string thrown = error_of<CommError>([&] {
      run_ranks(
          3,
          [&](std::shared_ptr<Communicator> comm) {
            at::Tensor value = torch::zeros({8});
            comm->all_reduce(value).wait();
            // Rank 1 leaves out a layer, and the next layer has the same size.
            if (comm->rank() != 1) comm->all_gather(torch::zeros({24}), value, {}, "unit 'blocks.3'").wait();
            comm->all_gather(torch::zeros({24}), value, {}, "unit 'blocks.4'").wait();
          },
          options);
    });
    expect_contains(thrown, "diverged");
    expect_contains(thrown, "unit 'blocks.3'");
    expect_contains(thrown, "unit 'blocks.4'");
    expect_contains(thrown, "rank 1");
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(30));
  }
}

// The number of elements is equal on the ranks, but the root, the dtype or the kind of reduction differs. For a root,
// each rank takes itself, so that all ranks send, or all wait.
TEST(CollectivesErrors, RanksWithDifferentArgumentsAreToldLongBeforeTheTimeout) {
  using Start = std::function<Pending(Communicator & comm, at::Tensor value)>;
  const std::pair<Start, const char*> operations[] = {
      {[](auto& comm, auto value) { return comm.broadcast(value, comm.rank(), "x"); }, "broadcast of x from rank 1"},
      {[](auto& comm, auto value) { return comm.reduce(value, comm.rank(), ReduceOp::kSum, "x"); },
       "reduce of x to rank 1"},
      {[](auto& comm, auto value) { return comm.scatter(value, torch::zeros({2 << 20}), comm.rank(), {}, "x"); },
       "scatter of x from rank 1"},
      {[](auto& comm, auto value) {
         return comm.all_reduce(comm.rank() == 1 ? value.to(at::kInt) : value, ReduceOp::kSum, "x");
       },
       "all-reduce of x (1048576 elements of Int)"},
      {[](auto& comm, auto value) {
         return comm.all_reduce(value, comm.rank() == 1 ? ReduceOp::kMax : ReduceOp::kSum, "x");
       },
       "all-reduce of x (1048576 elements, maxima)"}};
  for (const InitOptions& options : transports()) {
    for (const auto& [start, expected] : operations) {
      const auto began = std::chrono::steady_clock::now();
      const std::string thrown = error_of<CommError>([&, &start = start] {
        run_ranks(
            2, [&](std::shared_ptr<Communicator> comm) { start(*comm, torch::zeros({1 << 20})).wait(); }, options);
      });
      expect_contains(thrown, "diverged");
      expect_contains(thrown, expected);
      EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(30));
    }
  }
}

TEST(HostResults, TensorsMayHaveAnyStrides) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    const at::Tensor own = torch::arange(6).view({2, 3}).t(), one = torch::ones({1}, at::kLong).expand({3});
    EXPECT_TRUE(torch::equal(gather_to_host(*comm, own, "x"), torch::stack({own, own})));
    EXPECT_TRUE(torch::equal(reduce_to_host(*comm, own, ReduceOp::kSum, "x"), torch::arange(6).view({2, 3}).t() * 2));
    EXPECT_TRUE(torch::equal(reduce_to_host(*comm, one, ReduceOp::kSum, "x"), torch::full({3}, 2)));
  });
}

TEST(HostResults, AnUndefinedTensorIsAnInvalidArgument) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    const auto gather = [&] { (void)gather_to_host(*comm, {}, "losses"); };
    const auto reduce = [&] { (void)reduce_to_host(*comm, {}, ReduceOp::kSum, "losses"); };
    expect_contains(error_of<std::invalid_argument>(gather), "all-gather of losses");
    expect_contains(error_of<std::invalid_argument>(reduce), "all-reduce of losses");
    EXPECT_EQ(reduce_to_host(*comm, torch::ones({1}), ReduceOp::kSum, "losses").item<float>(), 2);
  });
}

// c10d records each group's first collective in a map of the process, without a lock.
TEST(BackendAllReduce, RanksOfOneProcessMayStartTheirFirstAtOnce) {
  constexpr int kWorld = 4;
  for (int round = 0; round < 40; ++round) {
    std::barrier together(kWorld);
    run_ranks(kWorld, [&](std::shared_ptr<Communicator> comm) {
      at::Tensor tensor = numbers(comm->rank(), 3);
      together.arrive_and_wait();
      backend_all_reduce(*comm, tensor).wait();
      EXPECT_TRUE(torch::equal(tensor, summed(kWorld, 3)));
    });
  }
}

// The first operation connects to all ranks, and waits for them.
TEST(BackendAllReduce, ARankThatFailsBeforeItsFirstEndsTheOthersByName) {
  std::vector<std::string> errors(3);
  const auto began = std::chrono::steady_clock::now();
  error_of<std::runtime_error>([&] {
    run_ranks(3, [&](std::shared_ptr<Communicator> comm) {
      if (comm->rank() == 1) throw std::runtime_error("mine");
      errors[comm->rank()] = error_of<CommError>([&] { backend_all_reduce(*comm, torch::ones({5}), "a test").wait(); });
      throw std::runtime_error(errors[comm->rank()]);
    });
  });
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(60)) << "of a timeout of 10 minutes";
  for (int rank : {0, 2})
    expect_contains(errors[rank],
                    "all-reduce of the size of a test, 5 elements (1 elements of Byte, maxima) failed on rank " +
                        std::to_string(rank) + " of 3: rank 1 failed: mine");
}

TEST(CollectivesErrors, ABrokenGroupSaysSoAtTheNextCall) {
  over_each_transport(2, [](std::shared_ptr<Communicator> comm) {
    if (comm->rank() == 1) {
      comm->abort("out of paper");
      comm->abort("a second reason, which does not count");
      const std::string own = error_of<CommError>([&] { comm->barrier(); });
      expect_contains(own, "out of paper");
      return;
    }
    expect_contains(error_of<CommError>([&] { comm->barrier(); }), "out of paper");
    expect_contains(error_of<CommError>([&] { comm->barrier(); }), "out of paper");
  });
}

}  // namespace
}  // namespace tessera::collectives_test
