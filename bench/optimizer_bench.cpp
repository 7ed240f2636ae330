// What does a step of each optimizer cost under FullyShardedDataParallel, and what does its state take? Ranks are
// threads of this process, of one intra-operator thread each; the parameters are those of GPT blocks of width 384.
// CPU time is summed over the ranks: more than at world 1 is what sharding adds. Target: Muon's within 1.1 of one
// process (gathering every matrix on all ranks costs as many times as there are ranks).
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <ctime>
#include <map>
#include <string>

#include "tessera/optim/optimizer_state.h"
#include "tessera/tessera.h"

namespace {

using namespace tessera;

constexpr int64_t kWidth = 384;
constexpr int kBlocks = 4, kWarmUp = 2, kSteps = 8;

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

struct Figures {
  double wall_ms = 0, cpu_ms = 0, bytes_per_parameter = 0;
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
    figures = {wall / kSteps, sums[0].item<double>(), sums[1].item<double>() / static_cast<double>(numel),
               state["block0.qkv.weight"]};
  });
  return figures;
}

template <class Options>
std::vector<torch::optim::OptimizerParamGroup> one_group(const ModelShards& model, const Options& options) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(model.parameters(), std::make_unique<Options>(options));
  return groups;
}

}  // namespace

int main() {
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
  std::printf("| optimizer | ranks | step, ms | CPU of all ranks, ms | of one rank's | state, bytes a parameter |\n");
  std::printf("| --- | --- | --- | --- | --- | --- |\n");
  for (const auto& [name, make] : optimizers) {
    const Figures alone = measure(1, make);
    for (const int world : {1, 2, 4}) {
      const Figures figures = world == 1 ? alone : measure(world, make);
      if (!torch::allclose(figures.probe, alone.probe, 1e-4, 1e-4)) {
        std::fprintf(stderr, "%s at %d ranks is not what it is at one\n", name, world);
        return 1;
      }
      std::printf("| %s | %d | %.1f | %.1f | %.2f | %.2f |\n", name, world, figures.wall_ms, figures.cpu_ms,
                  figures.cpu_ms / alone.cpu_ms, figures.bytes_per_parameter);
      std::fflush(stdout);
    }
  }
}
