// Every optimizer with a frozen 4-bit base, given all parameters: the adapters equal those of one process.
#include "tests/optim/given_gradients.h"
#include "tests/support/temporary_folder.h"

namespace tessera::frozen_base_test {
using namespace internal;
namespace {

using namespace testing_support;

torch::nn::Sequential quantized_model() {
  auto net = seeded(
      7, [] { return torch::nn::Sequential(torch::nn::Linear(8, 33), torch::nn::Tanh(), torch::nn::Linear(33, 8)); });
  seeded(8, [&] { return quantize_linears(*net, {.lora = {.rank = 3}}); });
  return net;
}

template <class Net>
at::Tensor loss_of(Net& net, int step, int micro, int rank) {
  const at::Tensor x = seeded(100 * step + 10 * micro + rank, [] { return torch::randn({16, 8}); });
  return (call(net, x).to(at::kFloat) - x.sin()).square().mean();
}

enum class Extra { kNone, kAccumulation, kOffload, kDisk };

// Each turn tests one stage together with other features of a loop.
template <class Optimizer, class Options>
void expect_adapters_train(const Options& options, double tolerance) {
  const TemporaryFolder disk;
  struct Turn {
    int world, stage;
    Extra extra = Extra::kNone;
  };
  for (const Turn& turn : {Turn{2, 0}, Turn{3, 1}, Turn{2, 2, Extra::kAccumulation}, Turn{1, 3},
                           Turn{3, 3, Extra::kAccumulation}, Turn{2, 3, Extra::kOffload}, Turn{2, 3, Extra::kDisk}}) {
    const int micros = turn.extra == Extra::kAccumulation ? 2 : 1;
    on_ranks(turn.world, [&](std::shared_ptr<Communicator> comm) {
      auto reference = quantized_model();
      Optimizer whole(reference->parameters(), options);
      ZeroOptions zero_options{.stage = turn.stage};
      zero_options.fsdp.auto_wrap = wrap_modules<torch::nn::LinearImpl>();
      const bool is_offloaded = turn.extra == Extra::kOffload || turn.extra == Extra::kDisk;
      zero_options.fsdp.offload = {.params = is_offloaded, .grads = is_offloaded};
      if (turn.extra == Extra::kDisk) zero_options.fsdp.offload.directory = disk.path().string();
      auto model = zero<Optimizer>(quantized_model(), options, comm, zero_options);
      for (int step = 0; step < 3; ++step) {
        model.step([&] {
          model.zero_grad();
          at::Tensor sum;
          for (int micro = 0; micro < micros; ++micro) {
            std::optional<ScopeExit> accumulating;
            if (micro + 1 < micros) accumulating.emplace(model.no_sync());
            const at::Tensor loss = loss_of(model, step, micro, comm->rank());
            loss.backward();
            sum = sum.defined() ? sum + loss.detach() : loss.detach();
          }
          return sum;
        });
        whole.step([&] {
          whole.zero_grad();
          at::Tensor sum;
          for (int micro = 0; micro < micros; ++micro)
            reference_backward(reference, turn.world, [&](int rank) {
              const at::Tensor loss = loss_of(reference, step, micro, rank);
              sum = sum.defined() ? sum + loss.detach() / turn.world : loss.detach() / turn.world;
              return loss;
            });
          return sum;
        });
      }
      auto state = model.full_state_dict();
      for (const auto& entry : reference->named_parameters()) {
        const at::Tensor own = state[entry.key()], expected = entry.value().detach();
        const std::string where = std::string("world ") + std::to_string(turn.world) + " stage " +
                                  std::to_string(turn.stage) + " " + entry.key();
        if (!at::isFloatingType(expected.scalar_type())) {
          EXPECT_TRUE(torch::equal(own, expected)) << where;
          continue;
        }
        EXPECT_TRUE(torch::allclose(own, expected, tolerance, tolerance))
            << where << " " << (own - expected).abs().max().template item<float>();
      }
    });
  }
}

TEST(FrozenBase, IsLeftOutByOptimizersOfWholeParameters) {
  expect_adapters_train<Lamb>(torch::optim::AdamWOptions(1e-2).weight_decay(0.1), 1e-4);
  expect_adapters_train<Muon>(MuonOptions(1e-2).bfloat16(false), 1e-4);
  expect_adapters_train<Adafactor>(AdafactorOptions(1e-2), 1e-4);
  expect_adapters_train<Lbfgs>(LbfgsOptions(1).max_iter(3).strong_wolfe(true), 1e-3);
}

TEST(FrozenBase, IsLeftOutByOthers) {
  expect_adapters_train<AdamW8bit>(AdamW8bitOptions(1e-3), 1e-4);
  expect_adapters_train<Lion>(LionOptions(1e-5), 1e-4);
  expect_adapters_train<SGD>(torch::optim::SGDOptions(1e-2).momentum(0.9), 1e-5);
  expect_adapters_train<ScheduleFreeAdamW>(ScheduleFreeOptions(1e-3), 1e-4);
  expect_adapters_train<AdamW>(torch::optim::AdamWOptions(1e-3), 1e-4);
}

}  // namespace
}  // namespace tessera::frozen_base_test
