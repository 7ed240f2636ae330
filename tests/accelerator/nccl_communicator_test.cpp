// Tests the NCCL communicator's own logic on devices: the order of operations, failures, and the end of groups.
#include <c10/util/ScopeExit.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <array>
#include <atomic>
#include <future>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "core/comm/watchdog/watchdog.h"
#include "tests/accelerator/simulated_training.h"

namespace tessera::nccl_communicator_test {
using namespace internal;
namespace {

using accelerator::on_devices;
using accelerator::Simulation;
using std::chrono::seconds;
using std::chrono::steady_clock;
using testing_support::error_of;
using testing_support::expect_contains;

using Body = std::function<void(std::shared_ptr<Communicator>)>;

// Returns the error of the first rank to fail, which must fail long before the timeout.
std::string first_error(int world, const Body& body, seconds timeout = seconds(60)) {
  const auto began = steady_clock::now();
  const std::string error = error_of<std::exception>([&] { on_devices(world, body, timeout); });
  EXPECT_LT(steady_clock::now() - began, seconds(30));
  return error;
}

at::Tensor ones(const Communicator& comm, int64_t numel = 8) { return torch::ones({numel}, comm.device()); }

TEST(NcclCommunicator, ARankThatThrowsEndsTheOthersByItsReason) {
  const Simulation simulation;
  std::mutex mutex;
  std::vector<std::string> others;
  first_error(3, [&](std::shared_ptr<Communicator> comm) {
    if (comm->rank() == 1) throw std::runtime_error("out of data");
    try {
      for (int i = 0; i < 3; ++i) {
        at::Tensor x = ones(*comm);
        comm->all_reduce(x, ReduceOp::kSum, "x").wait();
        x.cpu();
      }
    } catch (const CommError& error) {
      std::lock_guard lock(mutex);
      others.emplace_back(error.what());
    }
  });
  ASSERT_EQ(others.size(), 2u);
  for (const std::string& text : others) expect_contains(text, "rank 1 failed: out of data");
}

// The group's queue of operations must not own results, which would stay allocated until its thread checks the queue.
TEST(NcclCommunicator, AnOperationOwnsNoResultAfterItsWait) {
  for (const bool in_rank_order : {false, true}) {
    const Simulation simulation;
    on_devices(2,
               [](std::shared_ptr<Communicator> comm) {
                 at::Tensor full = ones(*comm), shard = ones(*comm, 4), sum = ones(*comm);
                 comm->all_gather(full, shard, {}, "full").wait();
                 comm->reduce_scatter(shard, full, ReduceOp::kSum, {}, "shard").wait();
                 comm->all_reduce(sum, ReduceOp::kSum, "sum").wait();
                 for (const at::Tensor& result : {full, shard, sum}) EXPECT_EQ(result.storage().use_count(), 1);
               },
               {.timeout = seconds(60), .rank_order_sums = in_rank_order});
  }
}

// The host waits for other ranks only if it needs a result.
TEST(NcclCommunicator, CountsForHowLongTheHostWaits) {
  const Simulation simulation;
  on_devices(2, [&](std::shared_ptr<Communicator> comm) {
    at::Tensor x = ones(*comm);
    comm->barrier();
    const double before = comm->traffic().wait_s;
    if (comm->rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    comm->all_reduce(x, ReduceOp::kSum, "x").wait();
    EXPECT_LT(comm->traffic().wait_s - before, 0.1) << "it went on";
    comm->throw_if_aborted("x");
    if (comm->rank() == 0) {
      EXPECT_GT(comm->traffic().wait_s - before, 0.2);
    }
  });
}

// After init() has chosen a device, kCUDA without an index means this device.
TEST(NcclCommunicator, InitMakesItsDeviceTheThreadsOwn) {
  const Simulation simulation;
  const c10::DeviceGuard guard(at::Device(at::kCUDA, 0));
  set_nccl_backends(accelerator::device_groups());
  const int devices = accelerator::device_count();
  const at::Device last(at::kCUDA, static_cast<c10::DeviceIndex>(devices - 1));
  const at::Device none(at::kCUDA, static_cast<c10::DeviceIndex>(devices));
  const auto comm = init({.device = last, .process = {.cache_memory = false}});
  EXPECT_EQ(comm->device(), last);
  EXPECT_EQ(torch::empty({1}, at::kCUDA).device(), comm->device());
  EXPECT_EQ(init({.device = at::kCUDA, .process = {.cache_memory = false}})->device(), at::Device(at::kCUDA, 0))
      << "LOCAL_RANK is 0";
  expect_contains(error_of<std::invalid_argument>([&] { init({.device = none, .process = {.cache_memory = false}}); }),
                  "but this process sees " + std::to_string(devices) + " CUDA devices");
}

TEST(NcclCommunicator, RanksThatDivergeAreNamed) {
  const Simulation simulation;
  const std::string error = first_error(2, [&](std::shared_ptr<Communicator> comm) {
    at::Tensor x = ones(*comm), shard = ones(*comm, 4);
    for (int i = 0; i < 3; ++i) {
      if (comm->rank() == 0) {
        comm->all_reduce(x, ReduceOp::kSum, "unit 'a'").wait();
      } else {
        comm->reduce_scatter(shard, x, ReduceOp::kSum, {}, "unit 'b'").wait();
      }
      x.cpu();
    }
  });
  expect_contains(error, "the ranks have diverged: operation #0 is ");
  expect_contains(error, "all-reduce of unit 'a' (8 elements) on rank 0");
  expect_contains(error, "reduce-scatter of unit 'b' (8 elements) on rank 1");
}

TEST(NcclCommunicator, ARankThatDoesNotComeIsNamedAfterTheTimeout) {
  const Simulation simulation;
  std::promise<void> has_failed;
  const std::string error = first_error(
      2,
      [&](std::shared_ptr<Communicator> comm) {
        if (comm->rank() == 1) return has_failed.get_future().wait();
        const auto tell = c10::make_scope_exit([&] { has_failed.set_value(); });
        for (int i = 0; i < 2; ++i) {
          at::Tensor x = ones(*comm);
          comm->all_reduce(x, ReduceOp::kSum, "x").wait();
          x.cpu();
        }
      },
      seconds(2));
  expect_contains(error, "all-reduce of x (8 elements) failed on rank 0 of 2: timed out after 2 s");
  expect_contains(error, "rank 1");
}

// NCCL's kernels do not notice that a peer has returned from its function, and heartbeats detect this much later. The
// end of a communicator may wait for its peers.
TEST(NcclCommunicator, ARankThatLeavesIsNamedWithinSeconds) {
  const Simulation simulation({.groups_end_together = true});
  for (const int leaver : {0, 1}) {
    std::mutex mutex;
    std::vector<std::string> others;
    const auto began = steady_clock::now();
    first_error(3, [&](std::shared_ptr<Communicator> comm) {
      try {
        for (int i = 0; i < 4; ++i) {
          if (comm->rank() == leaver && i == 3) return;
          at::Tensor x = ones(*comm);
          comm->all_reduce(x, ReduceOp::kSum, "x").wait();
          x.cpu();
        }
        comm->barrier();
      } catch (const CommError& error) {
        std::lock_guard lock(mutex);
        others.emplace_back(error.what());
      }
    });
    EXPECT_LT(steady_clock::now() - began, seconds(5));
    ASSERT_EQ(others.size(), 2u);
    for (const std::string& text : others)
      expect_contains(
          text, c10::str("rank ", leaver, " has left the group, and takes no part in operation #3, all-reduce of x"));
  }
}

// c10d reports an operation with an NCCL error as completed.
TEST(NcclCommunicator, AnErrorOfNcclsOwnEndsAllRanksByIt) {
  const Simulation simulation({.fails = [](int device, std::string_view what) {
    return device == 1 && what == "all-reduce of 9 elements" ? "NCCL error: unhandled cuda error (link down)" : "";
  }});
  std::mutex mutex;
  std::map<int, std::string> errors;
  first_error(3, [&](std::shared_ptr<Communicator> comm) {
    try {
      for (int i = 0; i < 20; ++i) {
        at::Tensor x = ones(*comm, 8 + i / 10);
        comm->all_reduce(x, ReduceOp::kSum, "x").wait();
        x.cpu();
      }
    } catch (const CommError& error) {
      std::lock_guard lock(mutex);
      errors[comm->rank()] = error.what();
    }
  });
  ASSERT_EQ(errors.size(), 3u);
  expect_contains(errors[1], "all-reduce of x (9 elements) failed on rank 1 of 3: NCCL error: unhandled cuda error");
  for (const int rank : {0, 2}) expect_contains(errors[rank], "rank 1 failed: all-reduce of x (9 elements) failed");
}

// A rank's view of a store in another process. Throws if that process has ended (kGone), and does not answer if it has
// stopped (kSilent).
class RemoteStore : public c10d::HashStore {
 public:
  enum State { kServes, kGone, kSilent };
  RemoteStore(c10::intrusive_ptr<c10d::Store> served, std::shared_ptr<std::atomic<State>> state)
      : served_(std::move(served)), state_(std::move(state)) {}
  void set(const std::string& key, const std::vector<uint8_t>& value) override { ask().set(key, value); }
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    return ask().compareSet(key, expected, desired);
  }
  std::vector<uint8_t> get(const std::string& key) override { return ask().get(key); }
  int64_t add(const std::string& key, int64_t value) override { return ask().add(key, value); }
  bool check(const std::vector<std::string>& keys) override { return ask().check(keys); }
  bool deleteKey(const std::string& key) override { return ask().deleteKey(key); }
  void wait(const std::vector<std::string>& keys) override { ask().wait(keys); }

 private:
  c10d::Store& ask() {
    state_->wait(kSilent);
    if (*state_ == kGone) throw std::runtime_error("Broken pipe");
    return *served_;
  }
  const c10::intrusive_ptr<c10d::Store> served_;
  const std::shared_ptr<std::atomic<State>> state_;  // shared, because threads that outlive the test read the state
};

// Rank 1 of three does not join the second all-reduce, from which on the store of the ranks in `cut` has `state`.
// Returns the errors of ranks 0 and 2.
std::map<int, std::string> errors_without_rank_1(const std::set<int>& cut, RemoteStore::State state) {
  accelerator::needs_devices(3);
  const auto shared = std::make_shared<std::atomic<RemoteStore::State>>(RemoteStore::kServes);
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::mutex mutex;
  std::map<int, std::string> errors;
  std::atomic<int> started = 0, ended = 0;
  const auto rank_main = [&](int rank) {
    const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(rank));
    const c10::DeviceGuard guard(device);
    c10::intrusive_ptr<c10d::Store> own = store;
    if (cut.contains(rank)) own = c10::make_intrusive<RemoteStore>(store, shared);
    auto comm = make_nccl_communicator(accelerator::device_groups(), own, rank, 3, device,
                                       {.timeout = seconds(60), .beat_every = Watchdog::kLookEvery});
    at::Tensor x = ones(*comm);
    comm->all_reduce(x).wait();
    x.cpu();
    if (++started == 3) {
      *shared = state;
      started.notify_all();
    }
    for (int now = started; now < 3; now = started) started.wait(now);
    if (rank == 1) {
      for (int now = ended; now < 2; now = ended) ended.wait(now);
      *shared = RemoteStore::kServes;
      shared->notify_all();
      return comm->abort("the test is over");
    }
    const auto text = error_of<CommError>([&] {
      comm->all_reduce(x, ReduceOp::kSum, "x").wait();
      x.cpu();
      comm->barrier();
    });
    {
      std::lock_guard lock(mutex);
      errors[rank] = text;
    }
    ++ended;
    ended.notify_all();
    for (int now = ended; now < 2; now = ended) ended.wait(now);
  };
  const auto began = steady_clock::now();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank) ranks.emplace_back(rank_main, rank);
  for (std::thread& rank : ranks) rank.join();
  EXPECT_LT(steady_clock::now() - began, seconds(30));
  return errors;
}

// A killed process publishes no failure, and NCCL's kernels do not notice its end.
TEST(NcclCommunicator, ARankThatDiesIsNamedWithinSeconds) {
  const Simulation simulation;
  for (auto& [rank, text] : errors_without_rank_1({1}, RemoteStore::kSilent)) {
    expect_contains(text, "all-reduce of x (8 elements) failed on rank 0 of 3: rank 1 has given no sign of life for");
    if (rank == 2) expect_contains(text, "rank 0 failed: ");
  }
}

// NCCL notices the end of a process at once, but does not know its rank.
TEST(NcclCommunicator, ARankWhoseLossNcclReportsIsNamed) {
  std::array<std::atomic<int>, 3> operations{};
  const Simulation simulation({.fails = [&](int device, std::string_view) {
    return device != 1 && ++operations[device] > 1 ? "NCCL error: remote process exited or there was a network error"
                                                   : "";
  }});
  const auto errors = errors_without_rank_1({1}, RemoteStore::kSilent);
  ASSERT_EQ(errors.size(), 2u);
  for (const auto& [rank, text] : errors)
    expect_contains(
        text, rank == 0 ? "all-reduce of x (8 elements) failed on rank 0 of 3: rank 1 has given no sign of life for"
                        : "rank 1 has given no sign of life for");
}

// The failed rank publishes its reason after NCCL's error has occurred.
TEST(NcclCommunicator, ARankWhoseLossNcclReportsHasItsReasonNamed) {
  const Simulation simulation({.fails = [&](int device, std::string_view what) {
    return device != 1 && what == "all-reduce of 9 elements" ? "NCCL error: remote process exited" : "";
  }});
  std::mutex mutex;
  std::vector<std::string> others;
  first_error(3, [&](std::shared_ptr<Communicator> comm) {
    if (comm->rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      throw std::runtime_error("out of data");
    }
    const std::string error = error_of<CommError>([&] {
      at::Tensor x = ones(*comm, 9);
      comm->all_reduce(x, ReduceOp::kSum, "x").wait();
      comm->throw_if_aborted("x");
    });
    std::lock_guard lock(mutex);
    others.push_back(error);
  });
  ASSERT_EQ(others.size(), 2u);
  for (const std::string& text : others) expect_contains(text, "rank 1 failed: out of data");
}

TEST(NcclCommunicator, TheStoresEndEndsAWait) {
  const Simulation simulation;
  for (auto& [rank, text] : errors_without_rank_1({0, 2}, RemoteStore::kGone))
    expect_contains(text, c10::str("all-reduce of x (8 elements) failed on rank ", rank,
                                   " of 3: the store cannot be reached any more, so the process of rank 0 has "
                                   "probably ended (Broken pipe)"));
}

TEST(NcclCommunicator, AStoreThatHasStoppedEndsAWait) {
  const Simulation simulation;
  for (auto& [rank, text] : errors_without_rank_1({0, 2}, RemoteStore::kSilent))
    expect_contains(text, c10::str("all-reduce of x (8 elements) failed on rank ", rank,
                                   " of 3: the store, in rank 0's process, has not answered for 2 s"));
}

TEST(NcclCommunicator, EndsWithNothingUnderWay) {
  const Simulation simulation({.longest_delay_us = 50000});
  on_devices(3, [&](std::shared_ptr<Communicator> comm) {
    auto part = comm->split(comm->rank() / 2);
    at::Tensor x = ones(*comm);
    for (int i = 0; i < 4; ++i) {
      comm->all_reduce(x).wait();
      if (comm->rank() < 2) part->all_reduce(x).wait();
    }
    auto dropped = comm->all_reduce(x);  // wait() is never called
  });
  EXPECT_TRUE(Simulation::findings().empty()) << Simulation::findings()[0];
}

TEST(NcclCommunicator, AnExceptionEndsItWithoutWaitingForOthers) {
  const Simulation simulation;
  const std::string error = first_error(2, [&](std::shared_ptr<Communicator> comm) {
    const auto own = std::exchange(comm, nullptr);
    at::Tensor x = ones(*own);
    if (own->rank() == 0) throw std::runtime_error("rank 0 gives up");
    own->all_reduce(x).wait();
    x.cpu();
    own->barrier();
  });
  expect_contains(error, "rank 0 gives up");
}

// Uses groups without a deadlock, although all groups of a device run in the order of issue, as on a GPU.
TEST(NcclCommunicator, GroupsAreUsedInOneOrder) {
  const Simulation simulation({.collectives_in_order = true});
  on_devices(4, [&](std::shared_ptr<Communicator> comm) {
    auto shard = comm->split(comm->rank() / 2), replicas = comm->split(comm->rank() % 2);
    for (int i = 0; i < 5; ++i) {
      at::Tensor x = ones(*comm), full = torch::empty({16}, comm->device());
      auto gather = shard->all_gather(full, x);
      auto cross = replicas->all_reduce(x);
      comm->all_reduce(full).wait();
      gather.wait();
      cross.wait();
    }
  });
  EXPECT_TRUE(Simulation::findings().empty()) << Simulation::findings()[0];
}

// Ranks use units of equal sizes in different orders. Unrelated collectives then match: nothing hangs, and all numbers
// are wrong. The host finds this, because it compares fingerprints of collectives as they arrive.
TEST(NcclCommunicator, UnitsThatAreUsedInAnotherOrderAreFound) {
  const Simulation simulation;
  const std::string error = first_error(2, [&](std::shared_ptr<Communicator> comm) {
    struct Net : torch::nn::Module {
      explicit Net(bool is_other_way) : other_way(is_other_way) {
        register_module("a", a);
        register_module("b", b);
      }
      at::Tensor forward(const at::Tensor& x) { return other_way ? a(b(x)) : b(a(x)); }
      bool other_way;
      torch::nn::Linear a{8, 8}, b{8, 8};
    };
    auto net = std::make_shared<Net>(comm->rank() == 1);
    net->to(comm->device());
    FullyShardedDataParallel fsdp(net, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>(), .prefetch = 0});
    const at::Tensor x = torch::ones({2, 8}, comm->device());
    for (int step = 0; step < 20; ++step) {  // several steps, because the device may be some steps behind the host
      fsdp.zero_grad();
      fsdp(x).sum().backward();
    }
  });
  expect_contains(error, "the ranks disagree about what was gathered and reduced");
}

// The rank fails during a backward in which the other ranks take part.
TEST(NcclCommunicator, ARankThatFailsInBackwardEndsTheOthersByItsReason) {
  const Simulation simulation;
  std::mutex mutex;
  std::vector<std::string> others;
  first_error(3, [&](std::shared_ptr<Communicator> comm) {
    torch::nn::Sequential net(torch::nn::Linear(8, 8), torch::nn::Tanh(), torch::nn::Linear(8, 8));
    net->to(comm->device());
    FullyShardedDataParallel fsdp(net, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
    at::Tensor x = torch::ones({2, 8}, comm->device());
    try {
      for (int step = 0; step < 3; ++step) {
        at::Tensor y = fsdp(x);
        if (step == 1 && comm->rank() == 2)
          y.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("the disk is full"); });
        y.sum().backward();
        fsdp.clip_grad_norm_(1.0);  // the host reads the norm
        fsdp.zero_grad();
      }
    } catch (const CommError& error) {
      std::lock_guard lock(mutex);
      others.emplace_back(error.what());
    }
  });
  ASSERT_EQ(others.size(), 2u);
  for (const std::string& text : others) expect_contains(text, "rank 2 failed: the disk is full");
}

// If the end of a group aborts a kernel, the kernel completes with arbitrary values. The host must not return these
// values as results.
TEST(NcclCommunicator, WhatAFailureHasCutIsNotGivenAway) {
  using Fsdp = FullyShardedDataParallel<torch::nn::Sequential>;
  struct Case {
    const char* name;
    std::function<void(Fsdp& fsdp, const at::Tensor& x)> look;
  };
  std::string given;  // the value read, if nothing was thrown
  const auto give = [&](const at::Tensor& tensor) { given += c10::str(tensor.sum().item<float>(), " "); };
  const std::vector<Case> cases = {
      {"full_state_dict", [&](Fsdp& fsdp, const auto&) { give(fsdp.full_state_dict().values()[0]); }},
      {"visit_full_state",
       [&](Fsdp& fsdp, const auto&) { fsdp.visit_full_state([&](const auto&, const at::Tensor& t) { give(t); }); }},
      {"summon_full_params",
       [&](Fsdp& fsdp, const auto&) {
         const ScopeExit scope = fsdp.summon_full_params();
         give(fsdp.module()->parameters()[0]);
       }},
      {"forward",
       [&](Fsdp& fsdp, const at::Tensor& x) {
         const at::NoGradGuard no_grad;
         give(fsdp(x));
       }},
      {"clip_grad_norm",
       [&](Fsdp& fsdp, const auto&) {
         fsdp.clip_grad_norm_on_device_(1.0, 2.0, /*error_if_nonfinite=*/true);
         given = "clipped";
       }},
      {"barrier",
       [&](Fsdp& fsdp, const auto&) {
         fsdp.comm()->barrier();
         given = "met";
       }},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    given = "";
    std::string error;
    const Simulation simulation;
    first_error(2, [&](std::shared_ptr<Communicator> comm) {
      torch::nn::Sequential net(torch::nn::Linear(8, 8), torch::nn::Tanh(), torch::nn::Linear(8, 8));
      net->to(comm->device());
      Fsdp fsdp(net, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
      const at::Tensor x = torch::ones({2, 8}, comm->device());
      fsdp(x).sum().backward();
      comm->barrier();
      if (comm->rank() == 1) throw std::runtime_error("out of memory");
      error = error_of<CommError>([&] { c.look(fsdp, x); });
      fsdp.comm()->abort("the test is over");
    });
    EXPECT_EQ(given, "");
    expect_contains(error, "rank 1 failed: out of memory");
  }
}

// The failure aborts the all-reduce of the last step, and no later communication reveals it.
TEST(NcclCommunicator, AReplicaWhoseLastStepWasCutIsNotGivenAway) {
  const Simulation simulation;
  std::string of_state, of_forward;
  first_error(2, [&](std::shared_ptr<Communicator> comm) {
    torch::nn::Sequential net(torch::nn::Linear(8, 8));
    net->to(comm->device());
    DistributedDataParallel ddp(net, comm);
    torch::optim::SGD optimizer(ddp.parameters(), 0.1);
    const at::Tensor x = torch::ones({2, 8}, comm->device());
    for (int step = 0; step < 3; ++step) {
      if (comm->rank() == 1 && step == 2) throw std::runtime_error("out of memory");
      ddp(x).sum().backward();
      optimizer.step();
    }
    of_state = error_of<CommError>([&] { ddp.full_state_dict(); });
    const at::NoGradGuard no_grad;
    of_forward = error_of<CommError>([&] { ddp(x); });
  });
  for (const std::string& error : {of_state, of_forward}) expect_contains(error, "rank 1 failed: out of memory");
}

// Hybrid sharding has three groups (all ranks, a shard group, a replica group), and each rank is in all of them.
TEST(NcclCommunicator, HybridTrainingUsesItsGroupsInOneOrder) {
  const accelerator_training::Case& of = accelerator_training::case_named("fsdp_hybrid");
  const Simulation simulation({.collectives_in_order = true});
  EXPECT_EQ(accelerator_training::difference(accelerator_training::train_on_gloo(of),
                                             accelerator_training::train_on_devices(of)),
            "");
  EXPECT_TRUE(Simulation::findings().empty()) << Simulation::findings()[0];
}

TEST(NcclCommunicator, RegisteredMemoryIsNcclsAlone) {
  InitOptions options;
  options.registered_memory = true;
  expect_contains(error_of<std::invalid_argument>([&] { run_ranks(1, [](auto) {}, options); }),
                  "InitOptions::registered_memory is NCCL's");
}

TEST(NcclCommunicator, RefusesWhatNcclHasNoTypeFor) {
  const Simulation simulation;
  on_devices(2, [&](std::shared_ptr<Communicator> comm) {
    at::Tensor x = torch::ones({4}, comm->device()).to(at::kShort);
    expect_contains(error_of<std::invalid_argument>([&] { comm->all_reduce(x).wait(); }), "int16");
    at::Tensor moved = torch::ones({4}, comm->device()).to(at::kShort) * comm->rank();
    comm->broadcast(moved, 1).wait();
    EXPECT_EQ(moved.sum().item<int64_t>(), 4);
    at::Tensor part = torch::zeros({comm->rank() == 0 ? 3 : 1}, moved.options());  // uneven
    comm->scatter(part, comm->rank() == 1 ? moved * 2 : at::Tensor(), 1, {3, 1}).wait();
    EXPECT_EQ(part.sum().item<int64_t>(), comm->rank() == 0 ? 6 : 2);
    at::Tensor flags = torch::ones({3}, comm->device()).to(at::kBool), all = torch::zeros({6}, flags.options());
    comm->all_gather(all, flags).wait();
    EXPECT_TRUE(all.all().item<bool>());
    at::Tensor numbers = torch::ones({2}, at::TensorOptions(comm->device()).dtype(at::kComplexFloat));
    at::Tensor both = torch::zeros({4}, numbers.options());
    comm->all_gather(both, numbers).wait();
    EXPECT_EQ(at::real(both).sum().item<float>(), 4);
  });
}

}  // namespace
}  // namespace tessera::nccl_communicator_test
