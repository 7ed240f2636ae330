// Measures planning a layout, by the numbers of parameters and of ranks. Compares copying gradients into a bucket with
// one copy of the same bytes, and a fused step of Adam with torch's loop.
//
// Targets: the time of planning grows with parameters but not with ranks; a bucket fills at the speed of a copy.
#include <benchmark/benchmark.h>
#include <torch/torch.h>

#include <tessera/tessera.h>
#include "core/layout/flat_layout.h"

namespace {

void plan_layout(benchmark::State& state) {
  const std::vector<int64_t> numels(state.range(0), 1000);
  for (auto _ : state) {
    const auto layout = tessera::internal::FlatLayout::evenly(numels, static_cast<int>(state.range(1)), 16);
    if (layout.parameters_numel() != 1000 * state.range(0)) return state.SkipWithError("wrong layout");
    benchmark::DoNotOptimize(layout);
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(plan_layout)
    ->ArgNames({"parameters", "ranks"})
    ->ArgsProduct({{100, 1000, 10000}, {1, 8, 1024, 65536}})
    ->Unit(benchmark::kMicrosecond);

// Tensors of `numel` elements that are copied to and from one flat buffer of 16 MiB.
struct Pieces {
  explicit Pieces(int64_t numel) : flat(torch::zeros({1 << 22})) {
    for (int64_t begin = 0; begin < flat.numel(); begin += numel) {
      places.push_back(flat.narrow(0, begin, numel));
      tensors.push_back(torch::ones({numel}));
    }
  }
  at::Tensor flat;
  std::vector<at::Tensor> places, tensors;
};

void flatten(benchmark::State& state) {
  at::set_num_threads(1);
  const torch::NoGradGuard no_grad;
  Pieces pieces(state.range(0));
  for (auto _ : state) {
    for (size_t i = 0; i < pieces.places.size(); ++i) pieces.places[i].copy_(pieces.tensors[i]);
    benchmark::ClobberMemory();
  }
  if (pieces.flat.sum().item<double>() != static_cast<double>(pieces.flat.numel()))
    return state.SkipWithError("wrong copy");
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(pieces.flat.nbytes()));
}
BENCHMARK(flatten)->ArgName("numel")->Arg(256)->Arg(4096)->Arg(1 << 16)->Arg(1 << 20)->Arg(1 << 22)->Unit(
    benchmark::kMicrosecond);

// Makes views of the flat buffer, as FSDP does instead of copying out of it.
void unflatten_by_views(benchmark::State& state) {
  const torch::NoGradGuard no_grad;
  const Pieces pieces(state.range(0));
  for (auto _ : state)
    for (int64_t begin = 0; begin < pieces.flat.numel(); begin += state.range(0))
      benchmark::DoNotOptimize(pieces.flat.as_strided({state.range(0)}, {1}, begin));
}
BENCHMARK(unflatten_by_views)->ArgName("numel")->Arg(4096)->Arg(1 << 20)->Unit(benchmark::kMicrosecond);

template <class Optimizer>
void adam(benchmark::State& state) {
  at::set_num_threads(1);
  std::vector<at::Tensor> parameters;
  for (int64_t i = 0; i < state.range(0); ++i) {
    parameters.push_back(torch::ones({state.range(1)}).set_requires_grad(true));
    parameters.back().mutable_grad() = torch::ones({state.range(1)});
  }
  Optimizer optimizer(parameters, torch::optim::AdamOptions(1e-3));
  for (auto _ : state) optimizer.step();
  state.SetItemsProcessed(state.iterations() * state.range(0) * state.range(1));
}
BENCHMARK(adam<tessera::Adam>)
    ->ArgNames({"tensors", "numel"})
    ->Args({1000, 100})
    ->Args({16, 1 << 18})
    ->Unit(benchmark::kMicrosecond);
BENCHMARK(adam<torch::optim::Adam>)
    ->ArgNames({"tensors", "numel"})
    ->Args({1000, 100})
    ->Args({16, 1 << 18})
    ->Unit(benchmark::kMicrosecond);

}  // namespace

BENCHMARK_MAIN();
