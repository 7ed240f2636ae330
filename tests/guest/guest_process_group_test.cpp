// Groups from a process group of the program: libtorch's gloo, and classes that a program derives.
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <future>
#include <map>
#include <mutex>

#include "core/comm/gloo/gloo_connections.h"
#include "core/comm/library_collectives.h"
#include "tests/guest/guests.h"

namespace {

using namespace tessera;
using namespace tessera::testing_support;
using namespace std::chrono_literals;

using Work = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// c10d records the first collective of each group in a map that ranks of one process share without a lock.
std::mutex recording;

BackendPtr gloo_backend(const StorePtr& store, int rank, int size) {
  return internal::connect_by_tcp(store, rank, size, {.address = "127.0.0.1", .timeout = 60s}, 1);
}

// A program's own backend with the least that Tessera needs. It counts its calls.
class LeastBackend : public c10d::Backend {
 public:
  explicit LeastBackend(BackendPtr gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "least"; }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    ++calls;
    std::lock_guard lock(recording);
    return gloo_->allreduce(tensors, options);
  }
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    ++calls;
    std::lock_guard lock(recording);
    return gloo_->broadcast(tensors, options);
  }
  std::atomic<int> calls = 0;

 protected:
  const BackendPtr gloo_;
};

// One that forwards everything.
class ForwardingBackend : public LeastBackend {
 public:
  using LeastBackend::LeastBackend;
  const std::string getBackendName() const override { return "forwarding"; }
  Work _allgather_base(at::Tensor& full, at::Tensor& own, const c10d::AllgatherOptions& options) override {
    ++calls;
    std::lock_guard lock(recording);
    return gloo_->_allgather_base(full, own, options);
  }
  Work _reduce_scatter_base(at::Tensor& own, at::Tensor& full, const c10d::ReduceScatterOptions& options) override {
    ++calls;
    std::lock_guard lock(recording);
    return gloo_->_reduce_scatter_base(own, full, options);
  }
  Work send(Tensors& tensors, int to, int tag) override { return ++calls, gloo_->send(tensors, to, tag); }
  Work recv(Tensors& tensors, int from, int tag) override { return ++calls, gloo_->recv(tensors, from, tag); }
};

// Notes whether two calls overlap. The first call by a second thread stays inside until a call overlaps it, or 100 ms.
class OneCallBackend : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  Work send(Tensors& tensors, int to, int tag) override {
    return alone([&] { return ForwardingBackend::send(tensors, to, tag); });
  }
  Work recv(Tensors& tensors, int from, int tag) override {
    return alone([&] { return ForwardingBackend::recv(tensors, from, tag); });
  }
  std::atomic<bool> has_second_thread = false, have_overlapped = false;

 private:
  Work alone(const std::function<Work()>& call) {
    if (is_inside_.exchange(true)) have_overlapped = true;
    if (std::this_thread::get_id() != first_ && !has_second_thread.exchange(true))
      for (int i = 0; i < 100 && !have_overlapped; ++i) std::this_thread::sleep_for(1ms);
    const Work work = call();
    is_inside_ = false;
    return work;
  }
  std::atomic<bool> is_inside_ = false;
  const std::thread::id first_ = std::this_thread::get_id();
};

enum class Kind { kForwarding, kLeast };

// Runs the body with each kind of backend, with and without a store in the process group. A body must communicate: gloo
// cannot connect to a rank that has left already.
template <class Body>
void with_process_groups(std::initializer_list<Kind> kinds, int world, Body body) {
  for (const Kind kind : kinds)
    for (const bool has_store : {true, false}) {
      const StorePtr store = c10::make_intrusive<c10d::HashStore>();
      EXPECT_EQ(on_threads(world,
                           [&](int rank) {
                             const auto gloo = gloo_backend(store, rank, world);
                             const auto backend =
                                 kind == Kind::kLeast
                                     ? c10::make_intrusive<LeastBackend>(gloo)
                                     : c10::intrusive_ptr<LeastBackend>(c10::make_intrusive<ForwardingBackend>(gloo));
                             auto group = has_store ? c10::make_intrusive<c10d::ProcessGroup>(store, rank, world)
                                                    : c10::make_intrusive<c10d::ProcessGroup>(rank, world);
                             group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, BackendPtr(backend));
                             body(group, *backend);
                           }),
                no_errors(world))
          << "world " << world << ", kind " << static_cast<int>(kind) << ", store " << has_store;
    }
}

TEST(GuestProcessGroup, RunsAllCollectives) {
  for (const int world : {1, 2, 3})
    for (const Kind kind : {Kind::kForwarding, Kind::kLeast})
      with_process_groups({kind}, world, [&](const auto& group, LeastBackend& backend) {
        const auto comm = communicator_from(group, {.timeout = 60s});
        const int before = backend.calls;
        EXPECT_EQ(comm->rank(), group->getRank());
        check_collectives(*comm, kind == Kind::kForwarding);
        EXPECT_GE(backend.calls.load(), world > 1 ? before + 12 : 0);
      });
}

// A part's thread receives in chunks what another rank sends.
TEST(GuestProcessGroup, ReducesLargeTensorsInItsParts) {
  with_process_groups({Kind::kForwarding}, 3, [](const auto& group, LeastBackend&) {
    const auto comm = communicator_from(group, {.timeout = 60s});
    const auto part = comm->split(comm->rank() / 2);
    const int64_t numel = (int64_t{1} << 20) + 3;
    const at::Tensor sum = torch::full({numel}, comm->rank() + 1, at::kFloat);
    part->all_reduce(sum).wait();  // of 1 + 2 on ranks 0 and 1, and of 3 on rank 2
    EXPECT_TRUE(at::equal(sum, torch::full({numel}, 3, at::kFloat)));
    const at::Tensor scattered = torch::zeros({numel}, at::kFloat);
    part->reduce_scatter(scattered, torch::full({part->size() * numel}, 2, at::kFloat)).wait();
    EXPECT_TRUE(at::equal(scattered, torch::full({numel}, 2 * part->size(), at::kFloat)));
  });
}

// A group's thread reduces a large tensor while the rank's thread uses another part of the same process group.
TEST(GuestProcessGroup, IsCalledByOneThreadAtATime) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_EQ(on_threads(2,
                       [&](int rank) {
                         const auto backend = c10::make_intrusive<OneCallBackend>(gloo_backend(store, rank, 2));
                         const auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, 2);
                         group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, BackendPtr(backend));
                         const auto comm = communicator_from(group, {.timeout = 60s});
                         const auto one = comm->split(0), other = comm->split(0);
                         Pending sum = one->all_reduce(torch::ones({int64_t{1} << 22}));
                         for (int i = 0; i < 20; ++i) other->barrier();
                         sum.wait();
                         EXPECT_TRUE(backend->has_second_thread);
                         EXPECT_FALSE(backend->have_overlapped);
                       }),
            no_errors(2));
}

// c10d itself would wait until the timeout of the process group. Only with a store is the missing rank known.
TEST(GuestProcessGroup, NamesARankThatDoesNotCome) {
  for (const bool has_store : {true, false}) {
    const StorePtr store = c10::make_intrusive<c10d::HashStore>();
    std::promise<void> has_failed;
    std::string error;
    EXPECT_EQ(on_threads(2,
                         [&](int rank) {
                           const auto group = has_store ? c10::make_intrusive<c10d::ProcessGroup>(store, rank, 2)
                                                        : c10::make_intrusive<c10d::ProcessGroup>(rank, 2);
                           group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM,
                                             gloo_backend(store, rank, 2));
                           if (rank == 1) return has_failed.get_future().wait();
                           try {
                             communicator_from(group, {.timeout = 300ms});
                           } catch (const CommError& thrown) {
                             error = thrown.what();
                           }
                           has_failed.set_value();
                         }),
              no_errors(2));
    EXPECT_NE(error.find(has_store ? "rank 1 did not come" : "not all ranks of the process group have called it"),
              std::string::npos)
        << error;
  }
}

TEST(GuestProcessGroup, CountsTheBytesOfPieces) {
  constexpr int kWorld = 2;
  with_process_groups({Kind::kForwarding, Kind::kLeast}, kWorld, [&](const auto& group, LeastBackend&) {
    const auto comm = communicator_from(group, {.timeout = 60s});
    const int64_t before = comm->traffic().sent_bytes;
    const at::Tensor shard = torch::empty({3});
    internal::reduce_scatter_pieces(*comm, shard, {torch::ones({2}), torch::ones({4})}, ReduceOp::kSum).wait();
    EXPECT_TRUE(torch::equal(shard, torch::full({3}, 2.0)));
    EXPECT_EQ(comm->traffic().sent_bytes - before, 3 * 4);
  });
}

TEST(GuestProcessGroup, TrainsForcesInFp64UnderEveryWrapper) {
  for (const Wrapper wrapper : {Wrapper::kDdp, Wrapper::kOssSdp, Wrapper::kFsdp})
    with_process_groups({Kind::kForwarding, Kind::kLeast}, 2, [&](const auto& group, LeastBackend&) {
      const auto comm = communicator_from(group, {.timeout = 60s});
      EXPECT_LT(difference_from_reference(train_forces(comm, wrapper), 2), 1e-12) << static_cast<int>(wrapper);
    });
}

// The copies of a shard are summed in a part of the process group. The layer's shards have more than 64 KiB.
TEST(GuestProcessGroup, TrainsHybridShardsOfLargeLayers) {
  constexpr int64_t kWide = 160;
  with_process_groups({Kind::kForwarding}, 4, [&](const auto& group, LeastBackend&) {
    const auto comm = communicator_from(group, {.timeout = 60s});
    EXPECT_LT(difference_from_reference(train_forces(comm, Wrapper::kHybridFsdp, kWide), 4, kWide), 1e-12);
  });
}

TEST(GuestProcessGroup, TakesABackendOfC10d) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_EQ(on_threads(2,
                       [&](int rank) {
                         const auto comm = communicator_from(
                             c10::make_intrusive<ForwardingBackend>(gloo_backend(store, rank, 2)), {.timeout = 60s});
                         check_collectives(*comm);
                       }),
            no_errors(2));
}

TEST(GuestProcessGroup, NamesAMissingOperation) {
  with_process_groups({Kind::kLeast}, 2, [&](const auto& group, LeastBackend&) {
    const auto comm = communicator_from(group, {.timeout = 60s});
    at::Tensor received = torch::empty({2});
    std::string error;
    try {
      comm->all_to_all(received, torch::ones({2}), {1, 1}, {1, 1}).wait();
    } catch (const CommError& thrown) {
      error = thrown.what();
    }
    EXPECT_NE(error.find("the program's process group or MPI reports: Backend least does not support"),
              std::string::npos)
        << error;
  });
}

TEST(GuestProcessGroup, ARankThatFailsEndsTheOthersByName) {
  with_process_groups({Kind::kForwarding}, 3, [&](const auto& group, LeastBackend&) {
    const auto comm = communicator_from(group, {.timeout = 60s});
    if (comm->rank() == 1) return comm->abort("the solver diverged");
    std::string error;
    try {
      for (int i = 0; i < 100; ++i) comm->all_reduce(torch::ones({4})).wait();
    } catch (const CommError& thrown) {
      error = thrown.what();
    }
    EXPECT_NE(error.find("the solver diverged"), std::string::npos) << error;
  });
}

TEST(GuestProcessGroup, RefusesWrongArguments) {
  EXPECT_THROW(communicator_from(c10::intrusive_ptr<c10d::ProcessGroup>()), std::invalid_argument);
  EXPECT_THROW(communicator_from(c10::intrusive_ptr<c10d::Backend>()), std::invalid_argument);
  const auto group = c10::make_intrusive<c10d::ProcessGroup>(0, 1);
  EXPECT_THROW(communicator_from(group, {.backend = "gloo"}), std::invalid_argument);
  EXPECT_THROW(communicator_from(group, {.rank_order_sums = true}), std::invalid_argument);
}

}  // namespace
