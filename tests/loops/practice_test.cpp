// What programs do beside training: look for anomalies, change optimizers, use weights by parts, train two at a time.
#include <torch/csrc/autograd/anomaly_mode.h>

#include <thread>

#include "tests/loops/loops.h"

namespace tessera::loops {
using namespace internal;
namespace {

TESSERA_LOOPS(Practice, all_setups);

TEST_P(Practice, LookingForAnomalies) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 2; ++step) {  // libtorch looks up the names of a whole stack for each node
      const torch::autograd::DetectAnomalyGuard look(/*check_nan=*/true);
      run.train(step);
    }
  });
}

TEST_P(Practice, FrozenInTheModuleAndThawedInTheParameters) {
  play(GetParam(), {}, [](Trainer& run) {
    run.train(0);
    for (at::Tensor& parameter : mlp_of(*run.model).fc2->parameters()) parameter.requires_grad_(false);
    for (at::Tensor& parameter : run.parameters()) parameter.requires_grad_(true);
    for (int step = 1; step < 3; ++step) run.train(step);
    for (at::Tensor& parameter : run.parameters()) EXPECT_TRUE(parameter.requires_grad());
  });
}

// Adaptive: ranks clip to the same number, though none wrote it down.
TEST_P(Practice, ClippingToAPartOfTheNormBefore) {
  play(GetParam(), {}, [](Trainer& run) {
    double most = 0.1;
    for (int step = 0; step < 4; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      most = 0.9 * run.clip_grad_norm_(most);
      run.optimizer().step();
    }
  });
}

// Where gradients are reduced to their owners the others have none to step with.
TEST_P(Practice, AnotherOptimizerHalfWay) {
  play(GetParam(),
       {.expect = GetParam().stage == 2 ? Expect::kRefused : Expect::kEqual, .says = kByOther, .equal_alone = true},
       [](Trainer& run) {
         run.train(0);
         run.train(1);
         run.optimizer().zero_grad();
         torch::optim::RMSprop other(run.parameters(), torch::optim::RMSpropOptions(1e-2));
         for (int step = 2; step < 4; ++step) {
           other.zero_grad();
           const at::Tensor loss = run.loss(step);
           loss.backward();
           other.step();
           run.note(loss.detach());
         }
       });
}

// One layer's weight is another's, turned; both are used in pieces.
struct ByParts : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor both = torch::cat({fc1->weight, fc2->weight.slice(0, 2, 6)});
    const at::Tensor h =
        torch::tanh(torch::nn::functional::linear(x, both)).index({torch::indexing::Ellipsis, torch::arange(8)});
    return torch::einsum("bi,ij->bj", {h, fc1->weight}) + fc2(h).select(1, 0).unsqueeze(1) * fc3->bias[2] +
           fc3->weight.masked_fill(fc3->weight.detach() > 0, 0).diagonal();
  }
};

TEST_P(Practice, WeightsByParts) {
  play(GetParam(), {.model = [] { return seeded_model<ByParts>(41); }, .unused = true}, three_steps);
}

// A number alone, nothing at all, and one that no step uses.
struct Odd : Net {
  Odd() {
    register_module("layers", layers);
    temperature = register_parameter("temperature", torch::tensor(1.5));
    nothing = register_parameter("nothing", torch::zeros({0, 3}));
    spare = register_parameter("spare", torch::ones({3, 1, 2}));
    steps = register_buffer("steps", torch::zeros({}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) override {
    if (is_training()) steps.add_(1);
    return layers->forward(x) / temperature + nothing.sum();
  }
  torch::nn::Sequential layers{torch::nn::Linear(kFeatures, 5), torch::nn::Functional(torch::tanh),
                               torch::nn::Linear(torch::nn::LinearOptions(5, kFeatures).bias(false))};
  at::Tensor temperature, nothing, spare, steps;
};

TEST_P(Practice, ANumberAndNothing) {
  play(GetParam(), {.model = [] { return seeded_model<Odd>(42); }, .unused = true}, three_steps);
}

// Layers are left out as a schedule says, the same on all ranks; the first ones in some steps.
struct Skipping : Net {
  Skipping() {
    for (int i = 0; i < 4; ++i) layers->push_back(torch::nn::Linear(kFeatures, kFeatures));
    register_module("layers", layers);
  }
  at::Tensor forward(const at::Tensor& x) override {
    at::Tensor h = x;
    for (size_t i = 0; i < layers->size(); ++i)
      if ((step + i) % 3 != 0) h = h + layers[i]->as<torch::nn::Linear>()->forward(h).tanh();
    return h;
  }
  torch::nn::ModuleList layers;
  size_t step = 0;
};

TEST_P(Practice, LayersLeftOutByASchedule) {
  play(GetParam(), {.model = [] { return seeded_model<Skipping>(43); }, .unused = true}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      dynamic_cast<Skipping&>(*run.model).step = static_cast<size_t>(step);
      run.train(step);
    }
  });
}

// The loss is looked at first, and a step is taken only where it is worth it: alike on all ranks.
TEST_P(Practice, GraphsThrownAwayWithoutABackward) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor loss = run.loss(step);
      if (step % 2 == 1) continue;
      loss.backward();
      run.optimizer().step();
    }
  });
}

// Moments are kept by hand in tensors like the parameters that the wrapper gives.
TEST_P(Practice, AnOptimizerWrittenByHand) {
  play(GetParam(),
       {.expect = GetParam().stage == 2 ? Expect::kRefused : Expect::kEqual, .says = kByOther, .equal_alone = true},
       [](Trainer& run) {
         std::vector<at::Tensor> moments;
         for (auto& parameter : run.parameters()) moments.push_back(torch::zeros_like(parameter));
         for (int step = 0; step < 3; ++step) {
           run.loss(step).backward();
           const torch::NoGradGuard no_grad;
           size_t i = 0;
           for (auto& parameter : run.parameters()) {
             at::Tensor& moment = moments[i++];
             if (!parameter.grad().defined()) continue;
             moment.lerp_(parameter.grad(), 0.5);
             parameter.add_(moment.sign(), -0.01);
             parameter.mutable_grad().reset();
           }
         }
       });
}

// Two programs in one process: each rank trains a second model, of another group, in a thread of its own.
TEST(PracticeOfTwo, TrainedInTwoThreadsAtATime) {
  auto losses = [](bool at_a_time) {
    std::vector<double> of_both(2);
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      const std::shared_ptr<Communicator> groups[] = {comm, comm->split(0)};
      double last[2] = {};
      auto train = [&](int which) {
        auto model = which == 0 ? mlp() : another_mlp();
        FullyShardedDataParallel fsdp(model, groups[which], {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
        torch::optim::AdamW optimizer(fsdp.parameters(), 1e-2);
        for (int step = 0; step < 20; ++step) {
          optimizer.zero_grad();
          const at::Tensor x =
              torch::linspace(-1, 1, 4 * kFeatures, at::kDouble).view({4, kFeatures}) * (1 + comm->rank());
          const at::Tensor loss = torch::mse_loss(fsdp(x), x.flip(1));
          loss.backward();
          optimizer.step();
          last[which] = loss.item<double>();
        }
      };
      if (at_a_time) {
        std::thread other([&] { train(1); });
        train(0);
        other.join();
      } else {
        train(0);
        train(1);
      }
      if (comm->rank() == 0) of_both = {last[0], last[1]};
    });
    return of_both;
  };
  EXPECT_EQ(losses(true), losses(false));
}

}  // namespace
}  // namespace tessera::loops
