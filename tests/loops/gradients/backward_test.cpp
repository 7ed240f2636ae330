// Several backwards, and several roots.
#include "tests/loops/loops.h"

#include <stdexcept>
#include "tests/loops/failing_backward.h"

namespace tessera::loops::backward_test {
using namespace internal;
namespace {

TESSERA_LOOPS(Backward, all_setups);

TEST_P(Backward, TwoOfOneGraph) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      at::Tensor loss = run.loss(step);
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
      run.optimizer().step();
    }
  });
}

TEST_P(Backward, TwoForwardsThenOneOfTheSum) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      (run.loss(2 * step) + run.loss(2 * step + 1)).backward();
      run.optimizer().step();
    }
  });
}

struct Deep : Net {
  Deep() {
    for (int i = 0; i < 9; ++i) layers->push_back(torch::nn::Linear(kFeatures, kFeatures));
    register_module("layers", layers);
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) override { return layers->forward(x).tanh(); }
  torch::nn::Sequential layers;
};

// With so many units, FSDP on a device reshards them at the end of each forward. The penalty uses them once more.
TEST_P(Backward, ManyLayersTwoForwardsAndAPenalty) {
  const auto deep = [] { return seeded(8, []() -> Model { return std::make_shared<Deep>(); }); };
  play(GetParam(), {.model = deep}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      at::Tensor loss = run.loss(2 * step) + run.loss(2 * step + 1);
      for (const at::Tensor& parameter : run.model->parameters()) loss = loss + 0.01 * parameter.square().sum();
      loss.backward();
      run.optimizer().step();
    }
  });
}

TEST_P(Backward, TwoForwardsThenTwo) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      at::Tensor first = run.loss(2 * step), second = run.loss(2 * step + 1);
      first.backward();
      second.backward();
      run.optimizer().step();
    }
  });
}

TEST_P(Backward, TwoHeadsOfOneForward) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor y = run(run.x(step));
      y.slice(1, 0, 4).square().mean().backward({}, /*retain_graph=*/true);
      torch::mse_loss(y.slice(1, 4), run.y(step).slice(1, 4)).backward();
      run.optimizer().step();
    }
  });
}

TEST_P(Backward, OfAPartOfTheModelOnly) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    Mlp& net = mlp_of(*run.model);
    for (int step = 0; step < 4; ++step) {
      run.optimizer().zero_grad();
      net.skip_fc2 = step % 2 == 0;
      run.loss(step).backward();
      run.optimizer().step();
    }
  });
}

// Weights are used once more, outside of forward: autograd adds up both.
TEST_P(Backward, RegularisedByTheModulesOwnParameters) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      at::Tensor loss = run.loss(step);
      for (const auto& parameter : run.model->parameters()) loss = loss + 0.1 * parameter.square().sum();
      run.note(loss.detach());
      loss.backward();
      run.optimizer().step();
    }
  });
}

// Under FSDP the penalty is over this rank's shards: its gradient is right there, and needs no mean over ranks.
TEST_P(Backward, RegularisedByTheWrappersParameters) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      at::Tensor penalty = torch::zeros({}, at::kDouble);
      for (const auto& parameter : run.parameters()) penalty = penalty + parameter.square().sum();
      (run.loss(step) + 0.1 * penalty).backward();
      run.optimizer().step();
    }
  });
}

}  // namespace
}  // namespace tessera::loops::backward_test
