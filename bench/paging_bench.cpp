// Measures the overhead of paging for an operator. Cases: an ordinary tensor; a parameter whose unit is resident and
// was used last (the usual case); two resident units in turn, where each use calls the runtime; tensors that are not
// parameters, in a process that pages. Also measures a timeline span while tracing is off.
//
// Target: an overhead below 1 microsecond for a resident parameter, and none for other tensors.
#include <benchmark/benchmark.h>
#include <torch/torch.h>

#include <tessera/tessera.h>
#include "core/trace/trace.h"

namespace {

// Cheap operators on small tensors, so that dispatch dominates.
struct Setup {
  Setup() : comm(tessera::init()) {
    torch::manual_seed(1);
    ordinary->push_back(torch::nn::Linear(8, 8));
    ordinary->push_back(torch::nn::Linear(8, 8));
    torch::manual_seed(1);
    sharded->push_back(torch::nn::Linear(8, 8));
    sharded->push_back(torch::nn::Linear(8, 8));
    fsdp = std::make_unique<tessera::FullyShardedDataParallel<torch::nn::Sequential>>(
        sharded, comm, tessera::FsdpOptions{.auto_wrap = tessera::wrap_modules<torch::nn::LinearImpl>()});
  }
  static Setup& instance() {
    static Setup setup;
    return setup;
  }
  std::shared_ptr<tessera::Communicator> comm;
  torch::nn::Sequential ordinary, sharded;
  std::unique_ptr<tessera::FullyShardedDataParallel<torch::nn::Sequential>> fsdp;
  at::Tensor x = torch::ones({8});
};

at::Tensor bias(torch::nn::Sequential& model, size_t layer) { return model[layer]->as<torch::nn::Linear>()->bias; }

void add(benchmark::State& state, const at::Tensor& left, const at::Tensor& right) {
  torch::NoGradGuard no_grad;
  for (auto _ : state) benchmark::DoNotOptimize(left.add(right));
}

void ordinary_tensors(benchmark::State& state) {
  Setup& setup = Setup::instance();
  add(state, setup.x, bias(setup.ordinary, 0));
}

void resident_parameter(benchmark::State& state) {
  Setup& setup = Setup::instance();
  if (!torch::equal(setup.x + bias(setup.sharded, 0), setup.x + bias(setup.ordinary, 0)))
    return state.SkipWithError("wrong result");
  add(state, setup.x, bias(setup.sharded, 0));
}

void two_units_in_turn(benchmark::State& state) {
  Setup& setup = Setup::instance();
  torch::NoGradGuard no_grad;
  const at::Tensor first = bias(setup.sharded, 0), second = bias(setup.sharded, 1);
  for (auto _ : state) {
    benchmark::DoNotOptimize(setup.x.add(first));
    benchmark::DoNotOptimize(setup.x.add(second));
  }
  state.SetItemsProcessed(2 * state.iterations());
}

void linear(benchmark::State& state, torch::nn::Sequential& model) {
  torch::NoGradGuard no_grad;
  const at::Tensor rows = torch::ones({1, 8});
  auto* layer = model[0]->as<torch::nn::Linear>();
  for (auto _ : state) benchmark::DoNotOptimize(layer->forward(rows));
}

void linear_ordinary(benchmark::State& state) { linear(state, Setup::instance().ordinary); }
void linear_resident(benchmark::State& state) { linear(state, Setup::instance().sharded); }

// Measures the cost of a span while tracing is off.
void trace_span_unset(benchmark::State& state) {
  if (tessera::internal::Trace::active() != nullptr) return state.SkipWithError("TESSERA_TRACE is set");
  for (auto _ : state) {
    tessera::internal::TraceSpan span(tessera::internal::SpanKind::kCompute, "nothing");
    benchmark::ClobberMemory();
  }
}

// The medians of the repetitions are the results to compare.
BENCHMARK(ordinary_tensors)->Repetitions(9)->ReportAggregatesOnly();
BENCHMARK(resident_parameter)->Repetitions(9)->ReportAggregatesOnly();
BENCHMARK(two_units_in_turn)->Repetitions(9)->ReportAggregatesOnly();
BENCHMARK(linear_ordinary)->Repetitions(9)->ReportAggregatesOnly();
BENCHMARK(linear_resident)->Repetitions(9)->ReportAggregatesOnly();
BENCHMARK(trace_span_unset)->Repetitions(9)->ReportAggregatesOnly();

}  // namespace

BENCHMARK_MAIN();
