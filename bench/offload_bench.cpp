// What does the host optimizer cost, and what does the disk add? First a step of AdamW on a fp32 parameter
// with torch::optim's loop, libtorch's fused operator, and HostAdamW without and with its copy in 16
// bit; then the same step with parameter and state on a disk, beside what the disk does by itself.
//
// Targets: HostAdamW 8 times torch::optim::AdamW; the disk tier close to the disk's own bandwidth. The folder is
// that of TESSERA_BENCH_DISK, or the system's for temporary files.
#include <benchmark/benchmark.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>

#include "tessera/flat/shard_mark.h"
#include "tessera/optim/adam_kernel.h"
#include "tessera/paging/disk_pager.h"
#include "tessera/tessera.h"

namespace {

constexpr int64_t kNumel = 16 << 20;
const auto kOptions = torch::optim::AdamWOptions(1e-3).weight_decay(0.1);

// Three steps against torch's, on the tail of a parameter too.
template <class Optimizer>
bool is_right() {
  at::Tensor own = torch::linspace(-1, 1, 100003), expected = own.clone();
  own.set_requires_grad(true);
  expected.set_requires_grad(true);
  Optimizer optimizer({own}, kOptions);
  torch::optim::AdamW reference({expected}, kOptions);
  for (int step = 0; step < 3; ++step) {
    own.mutable_grad() = torch::linspace(1 + step, -1, 100003);
    expected.mutable_grad() = own.grad().clone();
    optimizer.step();
    reference.step();
  }
  return torch::allclose(own, expected, 1e-5, 1e-6);
}

void report(benchmark::State& state, double bytes_per_element) {
  state.SetLabel(tessera::adam_instructions());
  state.counters["Melements/s"] =
      benchmark::Counter(static_cast<double>(kNumel) * 1e-6, benchmark::Counter::kIsIterationInvariantRate);
  state.counters["GB/s"] = benchmark::Counter(static_cast<double>(kNumel) * bytes_per_element * 1e-9,
                                              benchmark::Counter::kIsIterationInvariantRate);
}

template <class Optimizer>
void step(benchmark::State& state, bool has_copy) {
  if (!is_right<Optimizer>()) return state.SkipWithError("a step is not torch's");
  at::Tensor parameter = torch::zeros({kNumel}).set_requires_grad(true);
  auto copy =
      std::make_shared<tessera::LowPrecisionCopy>(tessera::LowPrecisionCopy{torch::zeros({kNumel}, at::kBFloat16)});
  if (has_copy) tessera::mark_as_shard(parameter, {copy->values, copy});
  Optimizer optimizer({parameter}, kOptions);
  parameter.mutable_grad() = torch::full({kNumel}, 0.01);
  optimizer.step();
  for (auto _ : state) optimizer.step();
  if (has_copy && !torch::equal(copy->values, parameter.detach().to(at::kBFloat16)))
    state.SkipWithError("the copy is not the rounded parameter");
  report(state, has_copy ? 30 : 28);  // four read, three written, of 4 bytes each; 2 of the copy
}

void torch_adamw(benchmark::State& state) { step<torch::optim::AdamW>(state, false); }
void fused_adamw(benchmark::State& state) { step<tessera::AdamW>(state, false); }
void host_adamw(benchmark::State& state) { step<tessera::HostAdamW>(state, false); }
void host_adamw_with_bf16_copy(benchmark::State& state) { step<tessera::HostAdamW>(state, true); }

std::string folder() {
  const char* chosen = std::getenv("TESSERA_BENCH_DISK");
  return chosen != nullptr ? chosen : std::filesystem::temp_directory_path().string();
}

// Blocks of 8 MiB, as many threads as the pager has, all written and all read.
void disk_by_itself(benchmark::State& state) {
  constexpr int64_t kBlock = 8 << 20, kBlocks = 48, kTargets = 16;
  tessera::File file = tessera::offload_file(folder());
  file.extend(kBlock * kBlocks);
  const at::Tensor memory = torch::ones({kBlock + 4096}, at::kByte);
  auto* aligned =
      reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.mutable_data_ptr()) + 4095) / 4096 * 4096);
  double written_s = 0, read_s = 0;
  const auto pass = [&](bool writes) {
    const auto began = std::chrono::steady_clock::now();
    tessera::TaskQueue queue(4);
    std::vector<std::future<void>> done;
    std::vector<at::Tensor> targets;
    for (int i = 0; i < kTargets; ++i) targets.push_back(torch::empty({kBlock + 4096}, at::kByte));
    for (int64_t i = 0; i < kBlocks; ++i) {
      auto* target = reinterpret_cast<void*>(
          (reinterpret_cast<uintptr_t>(targets[i % kTargets].mutable_data_ptr()) + 4095) / 4096 * 4096);
      done.push_back(queue.add([&, i, target] {
        writes ? file.write(aligned, kBlock, i * kBlock) : file.read(target, kBlock, i * kBlock);
      }));
    }
    for (auto& one : done) one.get();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  };
  for (auto _ : state) {
    written_s += pass(true);
    read_s += pass(false);
  }
  const double bytes = static_cast<double>(kBlock * kBlocks * state.iterations());
  state.counters["write_MB/s"] = bytes * 1e-6 / written_s;
  state.counters["read_MB/s"] = bytes * 1e-6 / read_s;
  state.SetLabel(file.is_direct() ? "direct" : "through the page cache");
}

// 16 parameters of 8 MiB with their state, 384 MiB, through buffers of 128 MiB.
void host_adamw_on_disk(benchmark::State& state) {
  constexpr int64_t kParameters = 16, kEach = 2 << 20;
  tessera::DiskPager pager({.directory = folder(), .buffer_bytes = 128 << 20, .read_ahead = 4});
  std::vector<at::Tensor> parameters;
  const at::Tensor gradient = torch::full({kEach}, 0.01);
  for (int64_t i = 0; i < kParameters; ++i) {
    parameters.push_back(pager.make({kEach}, {1}, at::kFloat, "a parameter").detach().set_requires_grad(true));
    parameters.back().mutable_grad() = gradient;
  }
  tessera::HostAdamW optimizer(parameters, kOptions);
  optimizer.step();
  optimizer.step();
  const int64_t before = pager.read_bytes() + pager.written_bytes();
  for (auto _ : state) optimizer.step();
  const auto moved = static_cast<double>(pager.read_bytes() + pager.written_bytes() - before);
  state.counters["moved_MB/step"] = moved * 1e-6 / static_cast<double>(state.iterations());
  state.counters["moved_MB/s"] = benchmark::Counter(moved * 1e-6, benchmark::Counter::kIsRate);
}

BENCHMARK(torch_adamw)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(fused_adamw)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(host_adamw)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(host_adamw_with_bf16_copy)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(disk_by_itself)->Unit(benchmark::kMillisecond)->UseRealTime()->Iterations(2);
BENCHMARK(host_adamw_on_disk)->Unit(benchmark::kMillisecond)->UseRealTime()->Iterations(5);

}  // namespace

BENCHMARK_MAIN();
