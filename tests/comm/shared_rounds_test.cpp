// Small operations as rounds in shared memory: random programs, mixed with messages, among threads and processes.
#include "core/comm/shared_memory/shared_rounds.h"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <csignal>
#include <random>
#include <thread>

#include "core/comm/backends.h"
#include "core/comm/collective.h"
#include "core/comm/fingerprint.h"
#include "core/comm/rank_order_sum.h"
#include "tests/comm/on_processes.h"
#include "tests/comm/stuck_rank.h"
#include "tests/support/matrix.h"
#include "tests/support/reference.h"

namespace tessera::shared_rounds_test {
using namespace internal;
namespace {

using namespace std::chrono_literals;
using namespace testing_support;

// ---- the plan -----------------------------------------------------------------------------------

TEST(SharedRoundsPlan, NothingOverlapsAndLinesAreApart) {
  for (const int ranks : {2, 3, 8, 64, 256}) {
    const SharedRoundsPlan plan(ranks);
    std::map<size_t, size_t> begins;  // and ends
    const auto add = [&](size_t begin, size_t bytes) { EXPECT_TRUE(begins.emplace(begin, begin + bytes).second); };
    for (uint64_t round = 0; round < SharedRoundsPlan::kRounds; ++round) {
      add(plan.arrivals(round), SharedRoundsPlan::kLineBytes);
      EXPECT_EQ(plan.arrivals(round), plan.arrivals(round + SharedRoundsPlan::kRounds));
      for (int rank = 0; rank < ranks; ++rank) add(plan.entry(round, rank), sizeof(SharedRoundsPlan::Entry));
    }
    for (int rank = 0; rank < ranks; ++rank) {
      add(plan.participant(rank), SharedRoundsPlan::kLineBytes);
      for (uint64_t slot = 0; slot < SharedRoundsPlan::kRounds; ++slot) {
        add(plan.slot(rank, slot), plan.slot_bytes());
        EXPECT_EQ(plan.slot(rank, slot) % 64, 0U);
      }
    }
    size_t end = 0;
    for (const auto& [from, to] : begins) {
      EXPECT_GE(from, end);
      end = to;
    }
    EXPECT_EQ(plan.bytes(), end);
    EXPECT_LE(plan.bytes(), size_t{1} << 31);
    EXPECT_FALSE(plan.reduces(plan.most_numel() + 1, 1));
    EXPECT_TRUE(plan.reduces(1 << 9, 1 << 16));
    EXPECT_EQ(plan.reduces(1 << 9, (1 << 16) + 1), ranks == 2);
  }
}

// Checks two rules: a slot is reused only after all ranks left its last round, and slots are at most as many as rounds
// that were in flight at once.
TEST(SharedRoundsPlan, SlotsAreTakenAgainOnceTheirRoundIsLeft) {
  std::mt19937 random(1);
  for (int program = 0; program < 200; ++program) {
    RoundSlots slots;
    std::map<uint64_t, uint64_t> last;
    uint64_t left = 0, most = 0;
    const uint64_t window = 1 + random() % SharedRoundsPlan::kRounds;
    for (uint64_t round = 0; round < 300; ++round) {
      while (round - left >= window || (left < round && random() % 2 == 0)) ++left;
      most = std::max(most, round - left + 1);
      const uint64_t slot = slots.take(round, [&] { return left; });
      if (last.contains(slot)) {
        EXPECT_LT(last[slot], left);
      }
      last[slot] = round;
    }
    EXPECT_LE(slots.ever_used(), most);
  }
}

// ---- programs -----------------------------------------------------------------------------------

using Kind = Collective::Kind;

struct Drawn {
  int group;  // the world, its two halves, or another group of all
  Kind kind;
  at::ScalarType dtype;
  ReduceOp op;
  int64_t numel;
  int root;
  bool uneven;
};

// A rank's contribution to operation `number`: random bits, so that the order of a sum matters.
at::Tensor drawn_values(int number, int rank, int64_t numel, at::ScalarType dtype) {
  at::Tensor bits = torch::empty({numel}, at::kLong);
  auto* values = bits.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < numel; ++i)
    values[i] = static_cast<int64_t>(Fingerprint().add(number).add(rank).add(i).value() >> 40) - (1 << 23);
  if (c10::isIntegralType(dtype, false)) return bits.to(dtype);
  return (bits.to(at::kDouble) / 1234567.0).to(dtype);
}

class Program {
 public:
  struct Options {
    bool with_two_steps = true;  // includes operations of two steps, for which ranks must wait in one order
    bool own_order = false;      // each rank waits in its own order
    int operations = 40;
    int killed = -1, killed_at = 0;  // the rank that kills itself, and when
    bool only_world = false;
  };
  Program(int seed, Options options) : random_(seed), own_random_(seed), seed_(seed), options_(options) {}

  // Returns the error; "" if there is none.
  std::string run(const std::shared_ptr<Communicator>& world) {
    own_random_.seed(seed_ * 1000 + world->rank());
    groups_ = {world};
    if (!options_.only_world) {
      groups_.push_back(world->split_by([](int rank) { return rank % 2; }));
      groups_.push_back(world->split_by([](int rank) { return rank / 2; }));
      groups_.push_back(world->split_by([](int) { return 0; }));
    }
    const size_t most_in_flight = random_() % 3 == 0 ? 50 : 1 + random_() % 6;
    for (int number = 0; number < options_.operations; ++number) {
      if (options_.killed == world->rank() && options_.killed_at == number) ::raise(SIGKILL);
      jitter();
      begin(number);
      auto& order = options_.own_order ? own_random_ : random_;
      while (!flights_.empty() && (flights_.size() > most_in_flight || order() % 3 == 0)) end_one(order);
    }
    auto& order = options_.own_order ? own_random_ : random_;
    while (!flights_.empty()) end_one(order);
    return wrong_;
  }

 private:
  struct Flight {
    Pending pending;
    at::Tensor result, expected;
    std::string text;
  };

  void jitter() {
    const auto draw = own_random_() % 40;
    if (draw == 0) std::this_thread::sleep_for(std::chrono::microseconds(own_random_() % 2000));
    if (draw < 10) std::this_thread::yield();
  }

  Drawn draw() {
    static constexpr Kind kKinds[] = {Collective::kAllGather,     Collective::kAllGather, Collective::kReduceScatter,
                                      Collective::kReduceScatter, Collective::kAllReduce, Collective::kAllReduce,
                                      Collective::kReduce,        Collective::kBroadcast, Collective::kAllToAll};
    static constexpr at::ScalarType kDtypes[] = {at::kFloat,    at::kFloat, at::kDouble,
                                                 at::kBFloat16, at::kLong,  at::kInt};
    static constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kAverage};
    static constexpr int64_t kNumels[] = {0, 1, 2, 5, 17, 100, 1000, 4097, 8192, 16384, 16385, 40000, 70001};
    Drawn drawn{};
    drawn.group = static_cast<int>(random_() % groups_.size());
    drawn.kind = kKinds[random_() % std::size(kKinds)];
    drawn.dtype = kDtypes[random_() % std::size(kDtypes)];
    drawn.op = kOps[random_() % std::size(kOps)];
    if (c10::isIntegralType(drawn.dtype, false) && drawn.op == ReduceOp::kAverage) drawn.op = ReduceOp::kMin;
    // Mostly small, because expected values of large ones take time.
    drawn.numel = kNumels[random_() % (random_() % 4 == 0 ? std::size(kNumels) : size_t{7})];
    drawn.root = static_cast<int>(random_() % 60);
    drawn.uneven = random_() % 3 == 0;
    const bool may_have_two_steps = drawn.kind == Collective::kAllReduce || drawn.kind == Collective::kBroadcast;
    if (!options_.with_two_steps && may_have_two_steps) drawn.numel = std::min<int64_t>(drawn.numel, 8192);
    return drawn;
  }

  void begin(int number) {
    const Drawn drawn = draw();
    Communicator& comm = *groups_[static_cast<size_t>(drawn.group)];
    const int size = comm.size(), rank = comm.rank(), root = drawn.root % size;
    const std::string what = "operation " + std::to_string(number);
    std::vector<at::Tensor> parts;  // by rank of the group; they depend on group and number, since members differ
    for (int peer = 0; peer < size; ++peer) parts.push_back(drawn_values(number, peer, drawn.numel, drawn.dtype));
    const at::Tensor own = parts[static_cast<size_t>(rank)].clone();
    const auto reduced = [&] {
      at::Tensor sum = torch::empty_like(parts[0]);
      reduce_in_rank_order(sum, parts, drawn.op);
      return sum;
    };
    std::vector<int64_t> counts;  // of `numel`
    for (int peer = 0; peer < size; ++peer) counts.push_back(drawn.numel / size);
    if (drawn.uneven) counts.assign(static_cast<size_t>(size), 0);
    counts[static_cast<size_t>(root)] += drawn.numel - std::accumulate(counts.begin(), counts.end(), int64_t{0});
    Flight flight;
    flight.text = what + " of seed " + std::to_string(seed_);
    switch (drawn.kind) {
      case Collective::kAllGather: {
        const auto expected = [&] {
          std::vector<at::Tensor> shards;
          for (size_t peer = 0; peer < counts.size(); ++peer) shards.push_back(parts[peer].narrow(0, 0, counts[peer]));
          return torch::cat(shards);
        };
        flight.expected = expected();
        flight.result = torch::zeros_like(own);
        at::Tensor shard = own.narrow(0, 0, counts[static_cast<size_t>(rank)]).clone();
        flight.pending = comm.all_gather(flight.result, shard, counts, what);
        break;
      }
      case Collective::kReduceScatter: {
        flight.expected = reduced().split_with_sizes(counts)[static_cast<size_t>(rank)];
        const bool in_place = drawn.root % 5 == 0;
        flight.result =
            in_place ? own.split_with_sizes(counts)[static_cast<size_t>(rank)] : torch::zeros_like(flight.expected);
        flight.pending = comm.reduce_scatter(flight.result, own, drawn.op, counts, what);
        break;
      }
      case Collective::kAllReduce:
        flight.expected = reduced();
        flight.result = own;
        flight.pending = comm.all_reduce(own, drawn.op, what);
        break;
      case Collective::kReduce:
        flight.expected = rank == root ? reduced() : own.clone();
        flight.result = own;
        flight.pending = comm.reduce(own, root, drawn.op, what);
        break;
      case Collective::kBroadcast:
        flight.expected = parts[static_cast<size_t>(root)];
        flight.result = own;
        flight.pending = comm.broadcast(own, root, what);
        break;
      default: {
        const std::vector<int64_t> each(static_cast<size_t>(size), drawn.numel);
        std::vector<at::Tensor> sent(static_cast<size_t>(size), own);
        flight.expected = torch::cat(parts);
        flight.result = torch::zeros_like(flight.expected);
        flight.pending = comm.all_to_all(flight.result, torch::cat(sent), each, each, what);
      }
    }
    // Dropping a handle does no harm if the others need no second step of this rank.
    if (random_() % 40 == 0 && options_.killed < 0 && drawn.numel <= 8192) return;
    flights_.push_back(std::move(flight));
  }

  void end_one(std::mt19937& order) {
    const auto chosen =
        flights_.begin() + static_cast<std::ptrdiff_t>(order() % 4 == 0 ? order() % flights_.size() : 0);
    Flight flight = std::move(*chosen);
    flights_.erase(chosen);
    flight.pending.wait();
    if (!torch::equal(flight.result, flight.expected) && wrong_.empty()) wrong_ = flight.text;
  }

  std::mt19937 random_;      // the same on all ranks
  std::mt19937 own_random_;  // each rank's own
  const int seed_;
  const Options options_;
  std::vector<std::shared_ptr<Communicator>> groups_;
  std::vector<Flight> flights_;
  std::string wrong_;
};

// TESSERA_ROUNDS_SEED sets the first seed, for a longer search.
int first_seed() {
  const char* text = std::getenv("TESSERA_ROUNDS_SEED");
  return text == nullptr ? 1 : std::stoi(text);
}

std::vector<int> seeds(int few, int many) {
  std::vector<int> all(static_cast<size_t>(has_full_matrix() ? many : few));
  std::iota(all.begin(), all.end(), first_seed());
  return all;
}

InitOptions with_timeout(std::chrono::milliseconds timeout) {
  InitOptions options;
  options.timeout = timeout;
  return options;
}

Program::Options drawn_options(int seed) {
  Program::Options options;
  options.own_order = seed % 3 == 0;
  options.with_two_steps = !options.own_order;
  return options;
}

TEST(SharedRounds, ProgramsOfThreadsGiveWhatTheDefinitionsSay) {
  for (const int seed : seeds(25, 1000))
    for (const int world : {2, 3, 4, 5}) {
      if (!has_full_matrix() && seed % 4 != world % 4) continue;
      SCOPED_TRACE(c10::str("seed ", seed, ", world ", world));
      run_ranks(
          world,
          [&](std::shared_ptr<Communicator> comm) { EXPECT_EQ(Program(seed, drawn_options(seed)).run(comm), ""); },
          with_timeout(60s));
      if (testing::Test::HasFailure()) return;
    }
}

TEST(SharedRoundsProcesses, ProgramsGiveWhatTheDefinitionsSay) {
  for (const int seed : seeds(9, 600)) {
    const int world = 2 + seed % 3;
    const auto codes = on_processes(world, [&](c10::intrusive_ptr<c10d::Store> store, int rank) {
      auto comm = make_gloo_communicator(std::move(store), rank, world, {"127.0.0.1", 60s});
      const std::string wrong = Program(seed, drawn_options(seed)).run(comm);
      if (!wrong.empty()) fprintf(stderr, "rank %d: %s\n", rank, wrong.c_str());
      comm->barrier();
      return wrong.empty() ? 0 : 1;
    });
    ASSERT_EQ(codes, std::vector<int>(static_cast<size_t>(world), 0)) << "seed " << seed;
  }
}

// All other ranks learn which rank is dead, in whichever group they are.
TEST(SharedRoundsProcesses, ARankThatIsKilledEndsTheOthersByName) {
  for (const int seed : seeds(6, 200)) {
    const int world = 2 + seed % 3;
    Program::Options options = drawn_options(seed);
    options.only_world = true;
    options.killed = seed / 3 % world;
    options.killed_at = seed * 7 % options.operations;
    const auto codes = on_processes(world, [&](c10::intrusive_ptr<c10d::Store> store, int rank) {
      auto comm = make_gloo_communicator(std::move(store), rank, world, {"127.0.0.1", 60s});
      const auto began = std::chrono::steady_clock::now();
      std::string text;
      try {
        const std::string wrong = Program(seed, options).run(comm);
        if (!wrong.empty()) return fprintf(stderr, "%s\n", wrong.c_str()), 3;
        comm->barrier("the end");
        return 1;
      } catch (const CommError& error) {
        text = error.what();
      }
      const bool names = text.find("rank " + std::to_string(options.killed)) != text.npos;
      if (!names) fprintf(stderr, "rank %d: %s\n", rank, text.c_str());
      return !names ? 2 : std::chrono::steady_clock::now() - began > 20s ? 4 : 0;
    });
    std::vector<int> expected(static_cast<size_t>(world), 0);
    expected[static_cast<size_t>(options.killed)] = 128 + SIGKILL;
    ASSERT_EQ(codes, expected) << "seed " << seed;
  }
}

// ---- one at a time ------------------------------------------------------------------------------

TEST(SharedRounds, ARankMayBeginManyRoundsBeforeItWaits) {
  for (const int ahead : {0, 1, 2})
    run_ranks(3, [&](std::shared_ptr<Communicator> comm) {
      if (comm->rank() != ahead) std::this_thread::sleep_for(100ms);
      std::vector<at::Tensor> sums;
      std::vector<Pending> pending;
      for (int i = 0; i < 300; ++i) {
        sums.push_back(torch::full({7}, 1.0f * comm->rank() + i));
        pending.push_back(comm->all_reduce(sums.back()));
      }
      for (auto handle = pending.rbegin(); handle != pending.rend(); ++handle) handle->wait();
      for (int i = 0; i < 300; ++i) ASSERT_EQ(sums[i].sum().item<float>(), 7 * (3 + 3 * i));
    });
}

TEST(SharedRounds, WhoWaitsForRoomIsToldOfARankThatIsStuck) {
  const std::string thrown = error_beside_a_stuck_rank(with_timeout(1500ms), [](Communicator& comm) {
    std::vector<Pending> pending;
    for (int i = 0; i < 100; ++i) pending.push_back(comm.all_reduce(torch::ones({3}), ReduceOp::kSum, "unit 'a'"));
  });
  expect_contains(thrown, "all-reduce of unit 'a' (3 elements) failed");
  expect_contains(thrown, "timed out after 1.5 s waiting for rank 1");
}

TEST(SharedRounds, OtherNumbersOfBytesAreAnErrorByName) {
  const std::string uneven = error_of<CommError>([] {
    run_ranks(2, [](std::shared_ptr<Communicator> comm) {
      const bool first = comm->rank() == 0;
      const std::vector<int64_t> counts = first ? std::vector<int64_t>{1, 3} : std::vector<int64_t>{3, 1};
      comm->all_gather(torch::zeros({4}), torch::zeros({1}), counts, "unit 'a'").wait();
    });
  });
  expect_contains(uneven, "all-gather of unit 'a' (4 elements) failed");
  expect_contains(uneven, "it has another number of bytes for it");
  const std::string dtypes = error_of<CommError>([] {
    run_ranks(2, [](std::shared_ptr<Communicator> comm) {
      at::Tensor value = torch::zeros({4}, comm->rank() == 0 ? at::kFloat : at::kDouble);
      comm->all_reduce(value, ReduceOp::kSum, "unit 'a'").wait();
    });
  });
  expect_contains(dtypes, "all-reduce of unit 'a' (4 elements of Double) on rank 1");
}

// Operations in flight at the end of the group have no result, and report that.
TEST(SharedRounds, WhatWasUnderWayWhenTheGroupEndedIsAnError) {
  run_ranks(2, [](std::shared_ptr<Communicator> comm) {
    for (const int64_t numel : {10, 1 << 20}) {
      auto part = comm->split_by([](int) { return 0; });
      at::Tensor sum = torch::ones({numel});
      Pending first = part->all_reduce(sum), second = part->all_reduce(sum.clone());
      part->abort("out of paper");
      expect_contains(error_of<CommError>([&] { first.wait(); }), "out of paper");
      expect_contains(error_of<CommError>([&] { second.wait(); }), "out of paper");
      comm->barrier();
    }
  });
}

// A rank that has contributed may end before others read it.
TEST(SharedRounds, WhatARankHasGivenOutlivesIt) {
  run_ranks(3, [](std::shared_ptr<Communicator> comm) {
    auto part = comm->split_by([](int) { return 0; });
    at::Tensor sum = torch::ones({5}), all = torch::zeros({3});
    auto summing = part->all_reduce(sum);
    auto gathering = part->all_gather(all, torch::full({1}, 1.0f * comm->rank()));
    comm->barrier();
    if (comm->rank() == 1) {
      summing = {}, gathering = {};
      part->abort("enough");
    }
    comm->barrier();
    if (comm->rank() == 1) return;
    summing.wait();
    gathering.wait();
    EXPECT_EQ(sum.sum().item<float>(), 15);
    EXPECT_EQ(all.sum().item<float>(), 3);
  });
}

TEST(SharedRounds, TrafficIsThatOfMessages) {
  for (const int world : {2, 3, 5, 11}) {
    std::vector<int64_t> sent[2];
    for (const bool in_memory : {false, true}) {
      InitOptions options;
      options.peer_memory = in_memory;
      std::vector<int64_t> of_ranks(static_cast<size_t>(world));
      run_ranks(
          world,
          [&](std::shared_ptr<Communicator> comm) {
            std::vector<int64_t> counts;
            for (int rank = 0; rank < world; ++rank) counts.push_back(10 + rank * rank);
            const int64_t full = std::accumulate(counts.begin(), counts.end(), int64_t{0});
            const at::Tensor all = torch::ones({full}), shard = torch::ones({counts[comm->rank()]});
            comm->all_gather(all, shard, counts).wait();
            comm->reduce_scatter(shard, all, ReduceOp::kSum, counts).wait();
            comm->all_reduce(all).wait();
            comm->reduce(all, 1).wait();
            comm->all_reduce(torch::ones({3}, at::kLong), ReduceOp::kMax).wait();
            comm->all_reduce(torch::ones({(1 << 14) - 1}, at::kDouble)).wait();  // in two steps by messages
            comm->barrier();
            EXPECT_EQ(comm->traffic().collectives, 7);
            of_ranks[comm->rank()] = comm->traffic().sent_bytes;
          },
          options);
      sent[in_memory] = of_ranks;
    }
    EXPECT_EQ(sent[0], sent[1]) << world;
  }
}

}  // namespace
}  // namespace tessera::shared_rounds_test
