// Measures the savings of mixed precision: bytes that a rank sends in forward and in backward, and the memory of
// unsharded parameters and of buckets. Compares fp32, bf16, and bf16 with gradients reduced in fp32. The two ranks are
// threads, and the time is that of a step of both.
//
// Target: in bf16, gathered bytes and gathered memory are half those of fp32.
#include <benchmark/benchmark.h>
#include <torch/torch.h>

#include <array>

#include <tessera/tessera.h>

namespace {

constexpr int64_t kWidth = 1024, kLayers = 8;
constexpr int64_t kModelBytes = kLayers * kWidth * kWidth * 4;

void step(benchmark::State& state, std::optional<at::ScalarType> compute, std::optional<at::ScalarType> reduce) {
  std::array<int64_t, 4> figures{};
  double seconds = 0;
  int64_t steps = 0;
  const auto repeats = static_cast<int64_t>(state.max_iterations);
  tessera::run_ranks(2, [&](std::shared_ptr<tessera::Communicator> comm) {
    at::set_num_threads(1);
    torch::nn::Sequential model;
    for (int64_t i = 0; i < kLayers; ++i)
      model->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
    tessera::FsdpOptions options{.auto_wrap = tessera::wrap_modules<torch::nn::LinearImpl>(),
                                 .reshard_after_forward = false};
    options.mixed_precision.param_dtype = compute;
    options.mixed_precision.reduce_dtype = reduce;
    tessera::FullyShardedDataParallel fsdp(model, comm, options);
    const at::Tensor x = torch::ones({16, kWidth});
    auto sent = [&] { return comm->traffic().sent_bytes; };
    fsdp(x).sum().backward();  // records the order of units for prefetching
    comm->barrier();
    const auto began = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < repeats; ++i) {
      const int64_t before = sent();
      at::Tensor loss = fsdp(x).to(at::kFloat).sum();
      const int64_t gathered = sent() - before;
      loss.backward();
      if (comm->rank() == 0)
        figures = {gathered, sent() - before - gathered, fsdp.memory().peak_gathered_bytes,
                   fsdp.memory().peak_bucket_bytes};
    }
    comm->barrier();
    if (comm->rank() == 0) seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  });
  steps = repeats;
  const int64_t expected = kModelBytes / 2 / (compute ? 2 : 1);
  if (figures[0] != expected) return state.SkipWithError("the bytes gathered are not what the layout says");
  for (auto _ : state) state.SetIterationTime(seconds / static_cast<double>(steps));
  state.counters["gathered_MB"] = static_cast<double>(figures[0]) * 1e-6;
  state.counters["reduced_MB"] = static_cast<double>(figures[1]) * 1e-6;
  state.counters["peak_gathered_MB"] = static_cast<double>(figures[2]) * 1e-6;
  state.counters["peak_buckets_MB"] = static_cast<double>(figures[3]) * 1e-6;
}

void fp32(benchmark::State& state) { step(state, {}, {}); }
void bf16(benchmark::State& state) { step(state, at::kBFloat16, {}); }
void bf16_reduced_in_fp32(benchmark::State& state) { step(state, at::kBFloat16, at::kFloat); }

BENCHMARK(fp32)->Iterations(10)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK(bf16)->Iterations(10)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK(bf16_reduced_in_fp32)->Iterations(10)->UseManualTime()->Unit(benchmark::kMillisecond);

}  // namespace

BENCHMARK_MAIN();
