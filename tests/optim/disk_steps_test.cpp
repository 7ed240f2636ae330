// Every optimizer steps parameters on disk, of which memory holds a part, like those in memory.
#include "tests/optim/given_gradients.h"
#include "tests/support/temporary_folder.h"

namespace tessera::disk_steps_test {
using namespace internal;
namespace {

using namespace testing_support;

constexpr int kLayers = 6;
constexpr int64_t kWidth = 64;
// Shards are 8 KiB at 2 ranks, each in its own unit.
constexpr int64_t kBufferBytes = 40 << 10;

torch::nn::Sequential deep_model() {
  return seeded(3, [] {
    torch::nn::Sequential net;
    for (int i = 0; i < kLayers; ++i) net->push_back(torch::nn::Linear(kWidth, kWidth));
    return net;
  });
}

// Parameters and their averages, by name.
using Values = std::map<std::string, at::Tensor>;

template <class Optimizer, class Options>
Values trained(const std::string& directory, const Options& options, Grouping<Options> grouping) {
  Values result;
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    ZeroOptions zero_options{.stage = 3};
    zero_options.groups = [&](const ZeroOptions::Parameters& parameters) { return grouping(parameters, options); };
    zero_options.fsdp.auto_wrap = wrap_modules<torch::nn::LinearImpl>();
    zero_options.fsdp.offload = {.params = true, .grads = true, .directory = directory};
    if (!directory.empty()) zero_options.fsdp.offload.disk_buffer_bytes = kBufferBytes;
    auto model = zero<Optimizer>(deep_model(), options, comm, zero_options);
    Ema ema(model, {.decay = 0.5});
    int64_t shard_bytes = 0;
    for (const at::Tensor& shard : model.parameters()) shard_bytes += static_cast<int64_t>(shard.nbytes());
    EXPECT_GT(shard_bytes, kBufferBytes) << "all of it has room in memory";
    for (int step = 0; step < 3; ++step) {
      model.step([&] {
        model.zero_grad();
        const at::Tensor x = seeded(10 * step + comm->rank(), [] { return torch::randn({4, kWidth}); });
        const at::Tensor loss = (model(x) - x).square().mean();
        loss.backward();
        return loss;
      });
      ema.update();
    }
    auto keep = [&](const std::string& prefix) {
      auto state = model.full_state_dict();
      if (comm->rank() == 0)
        for (const auto& item : state) result[prefix + item.key()] = item.value();
    };
    keep("");
    auto averages = ema.swap_in();
    keep("ema.");
  });
  return result;
}

template <class Optimizer, class Options>
void expect_same_as_in_memory(const char* name, const Options& options,
                              Grouping<Options> grouping = &one_group<Options>) {
  const TemporaryFolder disk;
  expect_same(trained<Optimizer>(disk.path().string(), options, grouping), trained<Optimizer>("", options, grouping),
              1e-6, name);
}

TEST(DiskSteps, OfOptimizersOfElements) {
  expect_same_as_in_memory<Lion>("Lion", LionOptions(1e-3).weight_decay(0.1));
  expect_same_as_in_memory<SGD>("SGD", torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true));
  expect_same_as_in_memory<AdamW>("AdamW", torch::optim::AdamWOptions(1e-3));
  expect_same_as_in_memory<Adam>("Adam", torch::optim::AdamOptions(1e-3).amsgrad(true));
  expect_same_as_in_memory<ScheduleFreeAdamW>("ScheduleFreeAdamW", ScheduleFreeOptions(1e-3));
}

TEST(DiskSteps, OfOptimizersOfWholeParameters) {
  expect_same_as_in_memory<Lamb>("Lamb", torch::optim::AdamWOptions(1e-3).weight_decay(0.1));
  expect_same_as_in_memory<Adafactor>("Adafactor", AdafactorOptions(1e-2));
  expect_same_as_in_memory<AdamW8bit>("AdamW8bit", AdamW8bitOptions(1e-3));
  expect_same_as_in_memory<Lbfgs>("Lbfgs", LbfgsOptions(1).max_iter(2).strong_wolfe(true));
  const Grouping<MuonOptions> mostly_adamw = [](const auto& parameters, const MuonOptions& options) {
    std::vector<at::Tensor> muon, adamw;
    for (const auto& item : parameters) (item.key() == "0.weight" ? muon : adamw).push_back(item.value());
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(muon, std::make_unique<MuonOptions>(options));
    groups.emplace_back(adamw, std::make_unique<MuonOptions>(MuonOptions::adamw(1e-3)));
    return groups;
  };
  expect_same_as_in_memory<Muon>("Muon", MuonOptions(1e-2), mostly_adamw);
}

}  // namespace
}  // namespace tessera::disk_steps_test
