// Measures the host optimizer, the disk tier and speculative steps. First, a step of AdamW on a fp32 parameter: by
// torch::optim's loop, by libtorch's fused operator, and by HostAdamW (plain, revocable, and with a 16-bit copy). Then
// the same step with parameter and state on a disk, and the bandwidth of the disk alone. Last, iterations with
// clipping, whose steps wait for the norm or are speculative.
//
// Targets: HostAdamW is 8 times as fast as torch::optim::AdamW. The disk tier is close to the disk's own bandwidth. The
// disk's folder is TESSERA_BENCH_DISK, by default the folder for temporary files.
#include <benchmark/benchmark.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include <tessera/tessera.h>
#include "core/layout/shard_mark.h"
#include "offload/disk/disk_pager.h"
#include "optim/host/adam_kernel.h"

namespace {

constexpr int64_t kNumel = 16 << 20;
const auto kOptions = torch::optim::AdamWOptions(1e-3).weight_decay(0.1);

// Returns whether three steps equal those of torch, for a parameter whose numel is not a multiple of a vector's width.
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
  state.SetLabel(tessera::internal::adam_instructions());
  state.counters["Melements/s"] =
      benchmark::Counter(static_cast<double>(kNumel) * 1e-6, benchmark::Counter::kIsIterationInvariantRate);
  state.counters["GB/s"] = benchmark::Counter(static_cast<double>(kNumel) * bytes_per_element * 1e-9,
                                              benchmark::Counter::kIsIterationInvariantRate);
}

// A step that can be rolled back, and the confirmation that frees its backup.
void host_adamw_revocable(benchmark::State& state) {
  at::Tensor parameter = torch::zeros({kNumel}).set_requires_grad(true);
  tessera::HostAdamW optimizer({parameter}, kOptions);
  parameter.mutable_grad() = torch::full({kNumel}, 0.01);
  const auto steps = optimizer.revocable_steps();
  auto step = [&] {
    steps->step({parameter});
    steps->keep();
  };
  step();
  for (auto _ : state) step();
  report(state, 32);  // the 28 bytes per element of step(), and 4 for a backup of the parameter
}

template <class Optimizer>
void step(benchmark::State& state, bool has_copy) {
  if (!is_right<Optimizer>()) return state.SkipWithError("a step is not torch's");
  at::Tensor parameter = torch::zeros({kNumel}).set_requires_grad(true);
  auto copy = std::make_shared<tessera::internal::LowPrecisionCopy>(
      tessera::internal::LowPrecisionCopy{torch::zeros({kNumel}, at::kBFloat16)});
  if (has_copy) tessera::internal::mark_as_shard(parameter, "", {kNumel}, {copy->values, copy});
  Optimizer optimizer({parameter}, kOptions);
  parameter.mutable_grad() = torch::full({kNumel}, 0.01);
  optimizer.step();
  for (auto _ : state) optimizer.step();
  if (has_copy && !torch::equal(copy->values, parameter.detach().to(at::kBFloat16)))
    state.SkipWithError("the copy is not the rounded parameter");
  report(state, has_copy ? 30 : 28);  // reads 4 and writes 3 values of 4 bytes; the copy has 2 bytes
}

void torch_adamw(benchmark::State& state) { step<torch::optim::AdamW>(state, false); }
void fused_adamw(benchmark::State& state) { step<tessera::AdamW>(state, false); }
void host_adamw(benchmark::State& state) { step<tessera::HostAdamW>(state, false); }
void host_adamw_with_bf16_copy(benchmark::State& state) { step<tessera::HostAdamW>(state, true); }

std::string folder() {
  const char* chosen = std::getenv("TESSERA_BENCH_DISK");
  return chosen != nullptr ? chosen : std::filesystem::temp_directory_path().string();
}

// Writes and reads blocks of 8 MiB with as many threads as the pager, to measure the disk's bandwidth.
void disk_by_itself(benchmark::State& state) {
  constexpr int64_t kBlock = 8 << 20, kBlocks = 48, kTargets = 16;
  tessera::internal::File file = tessera::internal::offload_file(folder());
  file.extend(kBlock * kBlocks);
  const at::Tensor memory = torch::ones({kBlock + 4096}, at::kByte);
  auto* aligned =
      reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.mutable_data_ptr()) + 4095) / 4096 * 4096);
  double written_s = 0, read_s = 0;
  const auto pass = [&](bool writes) {
    const auto began = std::chrono::steady_clock::now();
    tessera::internal::TaskQueue queue(4);
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

// Steps 16 parameters of 8 MiB, with their state 384 MiB, through buffers of 128 MiB.
void host_adamw_on_disk(benchmark::State& state) {
  constexpr int64_t kParameters = 16, kEach = 2 << 20;
  tessera::internal::DiskPager pager({.directory = folder(), .buffer_bytes = 128 << 20, .read_ahead = 4});
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

// Sleeps in backward, to simulate a host that waits for its device.
struct OnDevice : torch::autograd::Function<OnDevice> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, int64_t device_ms) {
    context->saved_data["ms"] = device_ms;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    std::this_thread::sleep_for(std::chrono::milliseconds(context->saved_data["ms"].toInt()));
    return {gradients[0], at::Tensor()};
  }
};

// A chain of layers under FSDP with offload. One thread computes, another runs the optimizer.
struct Training {
  Training(std::shared_ptr<tessera::Communicator> comm, double max_norm, bool speculative)
      : fsdp(layers(), comm,
             {.auto_wrap = tessera::wrap_modules<torch::nn::LinearImpl>(), .offload = {.params = true, .grads = true}}),
        optimizer(fsdp.parameters(), kOptions),
        step(fsdp, optimizer, {.max_norm = max_norm, .speculative = speculative}) {}
  static torch::nn::Sequential layers() {
    torch::manual_seed(1);
    torch::nn::Sequential net;
    for (int i = 0; i < 32; ++i) net->push_back(torch::nn::Linear(1024, 1024));
    return net;
  }
  double iteration_ms(at::Tensor x, int64_t device_ms) {
    const auto began = std::chrono::steady_clock::now();
    optimizer.zero_grad();
    torch::nn::Sequential net = fsdp.module();
    for (size_t i = 0; i < net->size(); ++i)
      x = OnDevice::apply(net[i]->as<torch::nn::Linear>()->forward(x), device_ms);
    x.square().mean().backward();
    const auto ended = std::chrono::steady_clock::now();
    step.finish();
    finish_ms.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - ended).count());
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count();
  }
  tessera::FullyShardedDataParallel<torch::nn::Sequential> fsdp;
  tessera::HostAdamW optimizer;
  tessera::StepInBackward step;
  std::vector<double> finish_ms;  // the part of the step after backward
};

double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2));
  return values[values.size() / 2];
}

// Alternates waiting and speculative steps, so that other load on the machine affects both. With a small `max_norm`,
// all steps clip. Arguments: rows of a batch, and milliseconds that the host sleeps in each layer's backward.
void step_under_clipping(benchmark::State& state, double max_norm) {
  at::set_num_threads(1);
  tessera::run_ranks(1, [&](std::shared_ptr<tessera::Communicator> comm) {
    Training waiting(comm, max_norm, false), speculative(comm, max_norm, true);
    const at::Tensor x = torch::ones({state.range(0), 1024});
    std::vector<double> waiting_ms, speculative_ms, ratios;
    auto turn = [&](Training& training) { return training.iteration_ms(x, state.range(1)); };
    for (int i = 0; i < 3; ++i) turn(waiting), turn(speculative);
    for (auto _ : state) {
      waiting_ms.push_back(turn(waiting));
      speculative_ms.push_back(turn(speculative));
      ratios.push_back(speculative_ms.back() / waiting_ms.back());
    }
    const auto expected = waiting.fsdp.full_state_dict(), own = speculative.fsdp.full_state_dict();
    for (const auto& entry : expected)
      if (!torch::equal(entry.value(), own[entry.key()])) state.SkipWithError("the two differ");
    state.counters["waiting_ms"] = median(waiting_ms);
    state.counters["speculative_ms"] = median(speculative_ms);
    state.counters["waiting_finish_ms"] = median(waiting.finish_ms);
    state.counters["speculative_finish_ms"] = median(speculative.finish_ms);
    state.counters["ratio"] = median(ratios);
    state.counters["taken_back"] = static_cast<double>(speculative.step.times_taken_back());
  });
}
void nothing_clips(benchmark::State& state) { step_under_clipping(state, 1e9); }
void everything_clips(benchmark::State& state) { step_under_clipping(state, 1e-9); }

BENCHMARK(torch_adamw)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(fused_adamw)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(host_adamw)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(host_adamw_revocable)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(host_adamw_with_bf16_copy)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(disk_by_itself)->Unit(benchmark::kMillisecond)->UseRealTime()->Iterations(2);
BENCHMARK(host_adamw_on_disk)->Unit(benchmark::kMillisecond)->UseRealTime()->Iterations(5);
BENCHMARK(nothing_clips)->Unit(benchmark::kMillisecond)->UseRealTime()->Args({64, 0})->Args({1, 4})->Iterations(20);
BENCHMARK(everything_clips)->Unit(benchmark::kMillisecond)->UseRealTime()->Args({64, 0})->Args({1, 4})->Iterations(20);

}  // namespace

BENCHMARK_MAIN();
