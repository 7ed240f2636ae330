// Compares Tessera's collectives on gloo with gloo's own, and with a copy of the same bytes.
//
// Ranks are threads of this process, connected over loopback. Each time is that of the slowest rank. The two
// implementations take turns over equal connections, so only rows of the same run are comparable. Sizes are those of
// the full tensor. `--benchmark_filter=world:2` selects two ranks.
#include <benchmark/benchmark.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <barrier>
#include <cstdlib>
#include <thread>

#include "core/comm/backends.h"

namespace {

using tessera::Communicator;
using Clock = std::chrono::steady_clock;

struct Rank {
  std::shared_ptr<Communicator> comm;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo;
  at::Tensor full, shard;
};

enum class Kind { kAllGather, kReduceScatter, kAllReduce };
enum class Who { kTessera, kGloo };

void run(Kind kind, Who who, Rank& rank) {
  if (who == Who::kTessera) {
    if (kind == Kind::kAllGather) rank.comm->all_gather(rank.full, rank.shard).wait();
    if (kind == Kind::kReduceScatter) rank.comm->reduce_scatter(rank.shard, rank.full).wait();
    if (kind == Kind::kAllReduce) rank.comm->all_reduce(rank.full).wait();
    return;
  }
  std::vector<at::Tensor> tensors{rank.full};
  if (kind == Kind::kAllGather) rank.gloo->_allgather_base(rank.full, rank.shard)->wait();
  if (kind == Kind::kReduceScatter) rank.gloo->_reduce_scatter_base(rank.shard, rank.full)->wait();
  if (kind == Kind::kAllReduce) rank.gloo->allreduce(tensors)->wait();
}

// Returns whether one implementation's results are those of the collective's definition.
bool verify(Kind kind, Who who, Rank& rank, int world) {
  const int64_t part = rank.shard.numel();
  const int own = rank.comm->rank();
  if (kind == Kind::kAllGather) {
    rank.shard.fill_(own + 1.0);
    run(kind, who, rank);
    for (int other = 0; other < world; ++other)
      if (!rank.full.narrow(0, other * part, part).eq(other + 1.0).all().item<bool>()) return false;
    return true;
  }
  rank.full.fill_(own + 1.0);
  run(kind, who, rank);
  const double sum = world * (world + 1) / 2.0;
  const at::Tensor result = kind == Kind::kReduceScatter ? rank.shard : rank.full;
  return result.eq(sum).all().item<bool>();
}

// Runs body(rank) on every rank's thread, between barriers. Returns the time of the slowest rank in seconds.
class World {
 public:
  World(int world, int64_t numel) : world_(world), ranks_(world) {
    // c10d's flight recorder does not support groups that start at the same time in one process.
    ::setenv("TORCH_FR_BUFFER_SIZE", "0", 1);
    auto ours = c10::make_intrusive<c10d::HashStore>(), theirs = c10::make_intrusive<c10d::HashStore>();
    each([&](Rank& rank, int index) {
      at::set_num_threads(1);
      const auto timeout = std::chrono::seconds(60);
      rank.comm = tessera::internal::make_gloo_communicator(ours, index, world_, {"127.0.0.1", timeout});
      auto options = c10d::ProcessGroupGloo::Options::create(timeout);
      options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
      rank.gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(theirs, index, world_, options);
      rank.full = torch::ones({numel / world_ * world_});
      rank.shard = torch::ones({numel / world_});
    });
  }

  template <class Body>
  double each(Body body) {
    std::barrier barrier(world_);
    std::vector<double> seconds(world_);
    std::vector<std::thread> threads;
    for (int index = 0; index < world_; ++index) {
      threads.emplace_back([&, index] {
        at::set_num_threads(1);
        barrier.arrive_and_wait();
        const auto began = Clock::now();
        body(ranks_[index], index);
        seconds[index] = std::chrono::duration<double>(Clock::now() - began).count();
      });
    }
    for (auto& thread : threads) thread.join();
    return *std::max_element(seconds.begin(), seconds.end());
  }

 private:
  const int world_;
  std::vector<Rank> ranks_;
};

void collective(benchmark::State& state, Kind kind, Who who) {
  const int world = static_cast<int>(state.range(0));
  const int64_t bytes = state.range(1);
  World ranks(world, bytes / 4);
  std::atomic<bool> correct = true;
  ranks.each([&](Rank& rank, int) {
    if (!verify(kind, who, rank, world)) correct = false;
  });
  if (!correct) return state.SkipWithError("wrong result");
  const int repeats = bytes > (1 << 22) ? 4 : 20;
  for (auto _ : state) {
    const double seconds = ranks.each([&](Rank& rank, int) {
      for (int i = 0; i < repeats; ++i) run(kind, who, rank);
    });
    state.SetIterationTime(seconds / repeats);
  }
  state.SetBytesProcessed(state.iterations() * bytes);
}

void copy(benchmark::State& state) {
  const at::Tensor from = torch::ones({state.range(0) / 4});
  at::Tensor to = torch::zeros_like(from);
  at::set_num_threads(1);
  for (auto _ : state) {
    to.copy_(from);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * state.range(0));
}

void add(const char* name, Kind kind, Who who) {
  benchmark::RegisterBenchmark(name, [=](benchmark::State& state) { collective(state, kind, who); })
      ->ArgNames({"world", "bytes"})
      ->ArgsProduct({{2, 4}, {1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26}})
      ->UseManualTime()
      ->MinTime(0.3)
      ->Unit(benchmark::kMillisecond);
}

}  // namespace

int main(int argc, char** argv) {
  add("all_gather/tessera", Kind::kAllGather, Who::kTessera);
  add("all_gather/gloo", Kind::kAllGather, Who::kGloo);
  add("reduce_scatter/tessera", Kind::kReduceScatter, Who::kTessera);
  add("reduce_scatter/gloo", Kind::kReduceScatter, Who::kGloo);
  add("all_reduce/tessera", Kind::kAllReduce, Who::kTessera);
  add("all_reduce/gloo", Kind::kAllReduce, Who::kGloo);
  benchmark::RegisterBenchmark("memcpy", copy)
      ->ArgName("bytes")
      ->Arg(1 << 20)
      ->Arg(1 << 26)
      ->Unit(benchmark::kMillisecond);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
