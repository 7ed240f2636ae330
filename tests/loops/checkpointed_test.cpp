// Parts that backward computes again.
#include "tests/loops/loops.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>
#include <future>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

namespace tessera::loops::checkpointed_test {
using namespace internal;
namespace {

TESSERA_LOOPS(CheckpointedParts, all_setups);

struct Checkpointed : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    at::Tensor h = fc1(x).tanh();
    const at::Tensor out = checkpointed(fc2, h);
    if (changes && h.requires_grad()) h.add_(1);
    return fc3(out.tanh() + h);
  }
  bool changes = false;
};

TEST_P(CheckpointedParts, ACheckpointedInputChangedInPlace) {
  play(GetParam(), {.expect = Expect::kThrows, .model = [] { return seeded_model<Checkpointed>(57); }},
       [](Trainer& run) {
         run.train(0);
         dynamic_cast<Checkpointed&>(*run.model).changes = true;
         run.train(1);
       });
}

TEST_P(CheckpointedParts, ACheckpointedInputChangedInPlaceAndCaught) {
  play(GetParam(), {.model = [] { return seeded_model<Checkpointed>(58); }}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      run.optimizer().zero_grad();
      dynamic_cast<Checkpointed&>(*run.model).changes = step == 1;
      try {
        run.loss(step).backward();
      } catch (const std::exception&) {
        continue;
      }
      run.optimizer().step();
    }
  });
}

// A saliency or an adversarial step between backward and step: the parameters' gradients stay as they are.
TEST_P(CheckpointedParts, AGradientOfInputsBeforeTheStep) {
  play(GetParam(), {.model = [] { return seeded_model<Checkpointed>(60); }}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      const at::Tensor x = run.x(10 + step).clone().requires_grad_();
      const auto gradients = torch::autograd::grad({run(x).square().sum()}, {x});
      run.notes.push_back(gradients[0].isfinite().all().item<bool>() ? 1 : 0);
      run.optimizer().step();
    }
  });
}

// fc2 is in the checkpointed part, which such a backward does not reach.
TEST_P(CheckpointedParts, BackwardIntoSomeParametersOnly) {
  play(GetParam(), {.expect = Expect::kThrows, .model = [] { return seeded_model<Checkpointed>(61); }, .unused = true},
       [](Trainer& run) {
         for (int step = 0; step < 3; ++step) {
           run.optimizer().zero_grad();
           const at::Tensor loss = run.loss(step);
           run.note(loss);
           loss.backward({}, /*retain_graph=*/std::nullopt, /*create_graph=*/false,
                         at::TensorList({mlp_of(*run.model).fc1->weight, mlp_of(*run.model).fc2->weight}));
           run.optimizer().step();
         }
       });
}

// A recomputation casts weights again. The next forward must not use the casts of the weights before the step.
TEST_P(CheckpointedParts, UnderAutocast) {
  play(GetParam(), {.model = [] { return in_single(seeded_model<Checkpointed>(59)); }, .same_data = true},
       three_steps_under_autocast);
}

TEST(CheckpointedOfPrograms, AGradientOfInputsLeavesParametersAlone) {
  torch::nn::Linear layer(4, 4);
  const at::Tensor x = torch::ones({2, 4}).requires_grad_();
  const at::Tensor loss = checkpointed([&](const at::Tensor& t) { return checkpointed(layer, t); }, x * 1).sum();
  const at::Tensor expected = layer->weight.detach().sum(0).expand({2, 4});
  EXPECT_TRUE(torch::allclose(torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true)[0], expected));
  EXPECT_FALSE(layer->weight.grad().defined());
  EXPECT_NE(error_of<std::logic_error>([&] {
              loss.backward({}, {}, false, at::TensorList({x}));
            }).find("backward with inputs reached a checkpointed function"),
            std::string::npos);
}

// Autograd must not change a parameter or a mask that the function returns.
TEST(CheckpointedOfPrograms, ACapturedTensorThatIsReturnedStaysAsItIs) {
  const at::Tensor x = torch::ones({3}).requires_grad_(), weight = torch::ones({3}).requires_grad_();
  const at::Tensor mask = torch::ones({3});
  const auto [y, same, parameter] =
      checkpointed([&](const at::Tensor& t) { return std::tuple{t * weight, mask, weight}; }, x);
  EXPECT_FALSE(mask.requires_grad());
  ASSERT_TRUE(weight.is_leaf());
  (y.sum() + parameter.sum()).backward();
  EXPECT_TRUE(torch::equal(weight.grad(), torch::full({3}, 2.0)));
  EXPECT_TRUE(torch::equal(x.grad(), torch::ones({3})));
}

TEST(CheckpointedOfPrograms, AnUnusedOutputGivesNoGradients) {
  const at::Tensor x = torch::ones({3}).requires_grad_(), head = torch::ones({3}).requires_grad_();
  checkpointed([&](const at::Tensor& t) { return std::pair{t * 2, t * head}; }, x).first.sum().backward();
  EXPECT_FALSE(head.grad().defined());
  EXPECT_TRUE(torch::equal(x.grad(), torch::full({3}, 2.0)));
}

// Autograd itself throws if a saved tensor was changed; recomputing must not hide that.
TEST(CheckpointedOfPrograms, InputChangedAfterTheCall) {
  for (bool with_offload : {false, true}) {
    for (bool checkpoint : {false, true}) {
      if (with_offload && !checkpoint) continue;
      auto layer = seeded(1, [] { return torch::nn::Linear(kFeatures, kFeatures); });
      ActivationOffload offload(at::kCPU, {.min_bytes = 0});
      const at::Tensor x = torch::ones({4, kFeatures}).requires_grad_();
      at::Tensor h = x * 2, y;
      {
        std::optional<ActivationOffload::Scope> use;
        if (with_offload) use.emplace(offload);
        y = checkpoint ? checkpointed(layer, h) : layer->forward(h);
      }
      h.mul_(3);
      EXPECT_NE(error_of<std::exception>([&] { y.square().sum().backward(); }), "")
          << (checkpoint ? "checkpointed" : "plain") << (with_offload ? " with offload" : "");
    }
  }
}

}  // namespace
}  // namespace tessera::loops::checkpointed_test
