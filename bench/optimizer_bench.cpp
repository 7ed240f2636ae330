// What does a step of each optimizer cost under FullyShardedDataParallel, and what does its state take? Ranks are
// threads of this process, of one intra-operator thread each; the parameters are those of GPT blocks of width 384.
// CPU time is summed over the ranks: more than at world 1 is what sharding adds. Target: Muon's, and that of its
// products of matrices (the Newton-Schulz iteration), within 1.1 of one process: gathering every matrix on all ranks
// costs as many times as there are ranks.
//
//   optimizer_bench [part of an optimizer's name] [rounds]
//
// A round measures all numbers of ranks; figures are medians over the rounds, and so are ratios within one.
#include <ATen/record_function.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <map>
#include <string>
#include <string_view>

#include "tessera/optim/optimizer_state.h"
#include "tessera/tessera.h"

namespace {

using namespace tessera;

constexpr int64_t kWidth = 384;
constexpr int kBlocks = 4, kWarmUp = 2, kSteps = 8;
constexpr std::array kWorlds{1, 2, 3, 4};

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    for (const auto& [name, rows] : {std::pair{"qkv", 3 * kWidth}, {"projection", kWidth}, {"expand", 4 * kWidth}})
      register_module(name, torch::nn::Linear(kWidth, rows));
    register_module("contract", torch::nn::Linear(4 * kWidth, kWidth));
  }
};

struct BlocksImpl : torch::nn::Module {
  BlocksImpl() {
    for (int i = 0; i < kBlocks; ++i) register_module("block" + std::to_string(i), std::make_shared<BlockImpl>());
  }
  at::Tensor forward(at::Tensor x) { return x; }  // never called: gradients are given
};
TORCH_MODULE(Blocks);

double thread_cpu_ms() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) * 1e-6;
}

// Processor time of all threads' products of matrices, of which no optimizer but Muon has any.
std::atomic<double> products_ms = 0;
struct ProductBegan : at::ObserverContext {
  double cpu_ms = thread_cpu_ms();
};
bool is_product(const at::RecordFunction& function) {
  const std::string_view name = function.name();
  return name == "aten::mm" || name == "aten::addmm";
}
void watch_products() {
  at::addGlobalCallback(at::RecordFunctionCallback(
                            [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
                              return is_product(function) ? std::make_unique<ProductBegan>() : nullptr;
                            },
                            [](const at::RecordFunction&, at::ObserverContext* began) {
                              if (began != nullptr)
                                products_ms += thread_cpu_ms() - static_cast<ProductBegan*>(began)->cpu_ms;
                            })
                            .scopes({at::RecordScope::FUNCTION}));
}

struct Figures {
  double wall_ms = 0, cpu_ms = 0, products_ms = 0, bytes_per_parameter = 0;
  at::Tensor probe;  // a parameter at the end
};

using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const ModelShards&)>;

Figures measure(int world, const Make& make) {
  Figures figures;
  run_ranks(world, [&](std::shared_ptr<Communicator> comm) {
    at::set_num_threads(1);
    Blocks blocks;
    {
      torch::NoGradGuard no_grad;
      for (const auto& item : blocks->named_parameters())
        item.value().copy_(torch::linspace(-1, 1, item.value().numel()).sin().view_as(item.value()));
    }
    FullyShardedDataParallel fsdp(blocks, comm, {.auto_wrap = wrap_modules<BlockImpl>()});
    const auto optimizer = make(fsdp);
    int64_t numel = 0;
    for (const NamedShard& shard : fsdp.named_shards()) {
      int64_t whole = 1;
      for (const int64_t size : shard.sizes) whole *= size;
      numel += whole;
      const at::Tensor gradient = torch::arange(shard.held.begin, shard.held.end).to(at::kFloat).mul(0.37).cos();
      at::Tensor leaf = shard.tensor;
      leaf.mutable_grad() = gradient;
    }
    for (int step = 0; step < kWarmUp; ++step) optimizer->step();
    if (comm->rank() == 0) products_ms = 0;
    comm->barrier();
    const auto start = std::chrono::steady_clock::now();
    const double cpu_start = thread_cpu_ms();
    for (int step = 0; step < kSteps; ++step) optimizer->step();
    const double cpu = thread_cpu_ms() - cpu_start;
    comm->barrier();
    const double wall = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    int64_t bytes = 0;
    for (const auto& [key, state] : optimizer->state())
      for (const auto& [name, tensor] : read_state(*state).tensors) bytes += static_cast<int64_t>(tensor.nbytes());
    at::Tensor sums = torch::tensor({cpu / kSteps, static_cast<double>(bytes)}, at::kDouble);
    comm->all_reduce(sums).wait();
    auto state = fsdp.full_state_dict();
    if (comm->rank() != 0) return;
    figures = {wall / kSteps, sums[0].item<double>(), products_ms / kSteps,
               sums[1].item<double>() / static_cast<double>(numel), state["block0.qkv.weight"]};
  });
  return figures;
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

// A line for each number of ranks. False if one of them does not train as one rank does.
bool report(const char* name, const Make& make, int rounds) {
  struct Column {
    std::vector<double> wall_ms, cpu_ms, products_ms, cpu_ratio, products_ratio;
  };
  std::map<int, Column> columns;
  double bytes_per_parameter = 0;
  for (int round = 0; round < rounds; ++round) {
    Figures alone;
    for (const int world : kWorlds) {
      const Figures figures = measure(world, make);
      if (world == 1) alone = figures;
      if (!torch::allclose(figures.probe, alone.probe, 1e-4, 1e-4)) {
        std::fprintf(stderr, "%s at %d ranks is not what it is at one\n", name, world);
        return false;
      }
      Column& column = columns[world];
      column.wall_ms.push_back(figures.wall_ms);
      column.cpu_ms.push_back(figures.cpu_ms);
      column.products_ms.push_back(figures.products_ms);
      column.cpu_ratio.push_back(figures.cpu_ms / alone.cpu_ms);
      column.products_ratio.push_back(alone.products_ms > 0 ? figures.products_ms / alone.products_ms : 0);
      bytes_per_parameter = figures.bytes_per_parameter;
    }
  }
  for (const auto& [world, column] : columns)
    std::printf("| %s | %d | %.1f | %.1f | %.2f | %.1f | %.2f | %.2f |\n", name, world, median(column.wall_ms),
                median(column.cpu_ms), median(column.cpu_ratio), median(column.products_ms),
                median(column.products_ratio), bytes_per_parameter);
  std::fflush(stdout);
  return true;
}

template <class Options>
std::vector<torch::optim::OptimizerParamGroup> one_group(const ModelShards& model, const Options& options) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(model.parameters(), std::make_unique<Options>(options));
  return groups;
}

}  // namespace

int main(int argc, char** argv) {
  auto elementwise = []<class Optimizer, class Options>(std::type_identity<Optimizer>, Options options) {
    return Make([options](const ModelShards& model) {
      return std::make_unique<Optimizer>(one_group(model, options), options);
    });
  };
  auto of_parameters = []<class Optimizer, class Options>(std::type_identity<Optimizer>, Options options) {
    return Make([options](const ModelShards& model) {
      return std::make_unique<Optimizer>(model, one_group(model, options), options);
    });
  };
  auto muon = [](bool bfloat16) {
    return Make([bfloat16](const ModelShards& model) {
      const auto matrices = MuonOptions(1e-2).bfloat16(bfloat16);
      const GroupRule<MuonOptions> rule{[](const NamedShard& p) { return p.sizes.size() >= 2; }, matrices};
      return std::make_unique<Muon>(model, group_parameters<MuonOptions>(model, {rule}, MuonOptions::adamw(1e-3)));
    });
  };
  const std::vector<std::pair<const char*, Make>> optimizers{
      {"torch::optim::AdamW", elementwise(std::type_identity<torch::optim::AdamW>(), torch::optim::AdamWOptions(1e-3))},
      {"AdamW", elementwise(std::type_identity<AdamW>(), torch::optim::AdamWOptions(1e-3))},
      {"AdamW8bit", of_parameters(std::type_identity<AdamW8bit>(), AdamW8bitOptions(1e-3))},
      {"Muon, fp32", muon(false)},
      {"Muon, bf16", muon(true)},
      {"Lion", elementwise(std::type_identity<Lion>(), LionOptions(1e-4))},
      {"SGD, momentum", elementwise(std::type_identity<SGD>(), torch::optim::SGDOptions(1e-2).momentum(0.9))},
      {"Adafactor", of_parameters(std::type_identity<Adafactor>(), AdafactorOptions(1e-2))},
      {"ScheduleFreeAdamW", elementwise(std::type_identity<ScheduleFreeAdamW>(), ScheduleFreeOptions(1e-3))},
      {"Lamb", of_parameters(std::type_identity<Lamb>(), torch::optim::AdamWOptions(1e-3))},
  };
  const std::string wanted = argc > 1 ? argv[1] : "";
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 1;
  watch_products();
  std::printf(
      "| optimizer | ranks | step, ms | CPU of all ranks, ms | of one rank's | products of matrices, ms | of one "
      "rank's | "
      "state, bytes a parameter |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n");
  for (const auto& [name, make] : optimizers)
    if (std::string(name).find(wanted) != std::string::npos && !report(name, make, rounds)) return 1;
}
