// Measures a step of each optimizer in each stage, and the bytes of its state. Ranks are threads of this process, with
// one intra-operator thread each. The parameters are those of GPT blocks of width 384. Processor time is the sum over
// ranks, so its excess over that of one rank is the cost of sharding.
//
// Target: Muon's processor time, and that of its matrix products (the Newton-Schulz iteration), is at most 1.1 times
// that of one rank. If every rank gathered every matrix, it would be N times as much. In stages 1 and 2, a step ends
// with the exchange of parameters, which stage 3 does in forward and backward.
//
//   optimizer_bench [part of an optimizer's name] [rounds]
//
// A round measures all layouts. Prints medians over rounds, also for ratios within a round.
#include <ATen/record_function.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <map>
#include <string>
#include <string_view>

#include <tessera/tessera.h>
#include "number_argument.h"
#include "optim/state/optimizer_state.h"
#include "plan/calibrate/processor_time.h"

namespace {

using namespace tessera;
using namespace tessera::internal;

constexpr int64_t kWidth = 384;
constexpr int kBlocks = 4, kWarmUp = 2, kSteps = 8;
struct Layout {
  int world, stage;
  auto operator<=>(const Layout&) const = default;
};
// The first layout, one rank, is the baseline of the others.
constexpr std::array kLayouts{Layout{1, 3}, Layout{2, 3}, Layout{3, 3}, Layout{4, 3},
                              Layout{2, 0}, Layout{2, 1}, Layout{2, 2}};

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
  at::Tensor forward(at::Tensor x) { return x; }  // never called, because give_gradients() sets the gradients
};
TORCH_MODULE(Blocks);

double thread_cpu_ms() { return thread_processor_s() * 1e3; }

// Processor time of all threads in matrix products, which only Muon computes.
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
  double wall_ms = 0, cpu_ms = 0, products_ms = 0, bytes_per_parameter = 0;  // bytes: maximum over ranks
  at::Tensor probe;                                                          // a parameter after all steps
};

// This rank's model and optimizer. probe() returns a parameter, to compare the layouts.
struct Trained {
  std::shared_ptr<ModelShards> model;
  torch::optim::Optimizer* optimizer;
  torch::optim::Optimizer::LossClosure closure;  // null: gradients are unchanged
  std::function<at::Tensor()> probe;
};
using Make = std::function<Trained(Blocks, std::shared_ptr<Communicator>, int stage)>;

// Sets gradients. Their elements have the same values in every layout, because they depend only on the element's index.
void give_gradients(const ModelShards& model) {
  for (const NamedShard& shard : model.named_shards()) {
    const at::Tensor gradient = torch::arange(shard.held.begin, shard.held.end).to(at::kFloat).mul(0.37).cos();
    at::Tensor leaf = shard.tensor;
    leaf.mutable_grad() = gradient.view(leaf.sizes());
  }
}

Figures measure(const Layout& layout, const Make& make) {
  Figures figures;
  run_ranks(layout.world, [&](std::shared_ptr<Communicator> comm) {
    at::set_num_threads(1);
    Blocks blocks;
    {
      torch::NoGradGuard no_grad;
      for (const auto& item : blocks->named_parameters())
        item.value().copy_(torch::linspace(-1, 1, item.value().numel()).sin().view_as(item.value()));
    }
    const Trained trained = make(blocks, comm, layout.stage);
    torch::optim::Optimizer* const optimizer = trained.optimizer;
    int64_t numel = 0;
    for (const NamedShard& shard : trained.model->named_shards()) numel += c10::multiply_integers(shard.sizes);
    give_gradients(*trained.model);
    for (int step = 0; step < kWarmUp; ++step) optimizer->step(trained.closure);
    if (comm->rank() == 0) products_ms = 0;
    comm->barrier();
    const auto start = std::chrono::steady_clock::now();
    const double cpu_start = thread_cpu_ms();
    for (int step = 0; step < kSteps; ++step) optimizer->step(trained.closure);
    const double cpu = thread_cpu_ms() - cpu_start;
    comm->barrier();
    const double wall = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    int64_t bytes = 0;
    for (const auto& [key, state] : optimizer->state())
      for (const auto& [name, tensor] : read_state(*state).tensors) bytes += static_cast<int64_t>(tensor.nbytes());
    at::Tensor sum = torch::tensor({cpu / kSteps}, at::kDouble), most = torch::tensor({bytes}, at::kLong);
    comm->all_reduce(sum).wait();
    comm->all_reduce(most, ReduceOp::kMax).wait();
    const at::Tensor probe = trained.probe();
    if (comm->rank() != 0) return;
    figures = {wall / kSteps, sum[0].item<double>(), products_ms / kSteps,
               static_cast<double>(most[0].item<int64_t>()) / static_cast<double>(numel), probe};
  });
  return figures;
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

// Prints a line for each layout. Returns false if a layout's probe() differs from that of one rank.
bool report(const char* name, const Make& make, int rounds) {
  struct Column {
    std::vector<double> wall_ms, cpu_ms, products_ms, cpu_ratio, products_ratio;
    double bytes_per_parameter = 0;
  };
  std::map<Layout, Column> columns;
  for (int round = 0; round < rounds; ++round) {
    Figures alone;
    for (const Layout& layout : kLayouts) {
      const Figures figures = measure(layout, make);
      if (layout == kLayouts[0]) alone = figures;
      if (!torch::allclose(figures.probe, alone.probe, 1e-4, 1e-4)) {
        std::fprintf(stderr, "%s at %d ranks in stage %d is not what it is at one\n", name, layout.world, layout.stage);
        return false;
      }
      Column& column = columns[layout];
      column.wall_ms.push_back(figures.wall_ms);
      column.cpu_ms.push_back(figures.cpu_ms);
      column.products_ms.push_back(figures.products_ms);
      column.cpu_ratio.push_back(figures.cpu_ms / alone.cpu_ms);
      column.products_ratio.push_back(alone.products_ms > 0 ? figures.products_ms / alone.products_ms : 0);
      column.bytes_per_parameter = figures.bytes_per_parameter;
    }
  }
  for (const auto& [layout, column] : columns)
    std::printf("| %s | %d | %d | %.1f | %.1f | %.2f | %.1f | %.2f | %.2f |\n", name, layout.world, layout.stage,
                median(column.wall_ms), median(column.cpu_ms), median(column.cpu_ratio), median(column.products_ms),
                median(column.products_ratio), column.bytes_per_parameter);
  std::fflush(stdout);
  return true;
}

template <class Optimizer, class Options>
Make with(const Options& options, std::function<ZeroOptions::Groups(const ZeroOptions::Parameters&)> groups = nullptr) {
  return [options, groups](Blocks blocks, std::shared_ptr<Communicator> comm, int stage) {
    ZeroOptions zero_options{.stage = stage, .groups = groups};
    zero_options.fsdp.auto_wrap = wrap_modules<BlockImpl>();
    auto model = std::make_shared<Zero<Blocks, Optimizer>>(blocks, options, comm, zero_options);
    Trained trained{model, &model->optimizer(), nullptr,
                    [zero = model.get()] { return zero->full_state_dict()["block0.qkv.weight"]; }};
    if constexpr (std::is_same_v<Optimizer, Lbfgs>)
      trained.closure = [zero = model.get(), loss = 0.0]() mutable {
        const at::NoGradGuard no_grad;
        for (const NamedShard& shard : zero->named_shards()) {  // the gradient of an anisotropic quadratic
          const at::Tensor slopes = torch::arange(shard.held.begin, shard.held.end).to(at::kFloat).cos().add_(1.5);
          at::Tensor leaf = shard.tensor;
          leaf.mutable_grad() = leaf.detach() * slopes.view(leaf.sizes());
        }
        return torch::full({}, loss -= 1);
      };
    return trained;
  };
}

ZeroOptions::Groups matrices_to_muon(const ZeroOptions::Parameters& parameters, const MuonOptions& options) {
  std::vector<at::Tensor> matrices, others;
  for (const auto& item : parameters) (item.key().ends_with("weight") ? matrices : others).push_back(item.value());
  ZeroOptions::Groups groups;
  groups.emplace_back(matrices, std::make_unique<MuonOptions>(options));
  groups.emplace_back(others, std::make_unique<MuonOptions>(MuonOptions::adamw(1e-3)));
  return groups;
}

}  // namespace

int main(int argc, char** argv) {
  auto muon = [](bool bfloat16) {
    const auto options = MuonOptions(1e-2).bfloat16(bfloat16);
    return with<Muon>(options, [options](const auto& parameters) { return matrices_to_muon(parameters, options); });
  };
  const auto adamw = torch::optim::AdamWOptions(1e-3);
  const std::vector<std::pair<const char*, Make>> optimizers{
      {"torch::optim::AdamW", with<torch::optim::AdamW>(adamw)},
      {"AdamW", with<AdamW>(adamw)},
      {"AdamW8bit", with<AdamW8bit>(AdamW8bitOptions(1e-3))},
      {"Muon, fp32", muon(false)},
      {"Muon, bf16", muon(true)},
      {"Lion", with<Lion>(LionOptions(1e-4))},
      {"SGD, momentum", with<SGD>(torch::optim::SGDOptions(1e-2).momentum(0.9))},
      {"Adafactor", with<Adafactor>(AdafactorOptions(1e-2))},
      {"ScheduleFreeAdamW", with<ScheduleFreeAdamW>(ScheduleFreeOptions(1e-3))},
      {"Lamb", with<Lamb>(adamw)},
      {"Lbfgs, 3 remembered", with<Lbfgs>(LbfgsOptions(0.1).max_iter(1).history_size(3))},
  };
  const std::string wanted = argc > 1 ? argv[1] : "";
  const int rounds = number_argument(argc, argv, 2, 1);
  watch_products();
  std::printf(
      "| optimizer | ranks | stage | step, ms | CPU of all ranks, ms | of one rank's | products of matrices, ms | of "
      "one rank's | state of a rank, bytes a parameter of the model |\n| --- | --- | --- | --- | --- | --- | --- | --- "
      "| --- |\n");
  for (const auto& [name, make] : optimizers)
    if (std::string(name).find(wanted) != std::string::npos && !report(name, make, rounds)) return 1;
}
