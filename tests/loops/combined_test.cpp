// Several things at a time: weights that thaw while gradients accumulate.
#include "tests/loops/failing_backward.h"

namespace tessera::loops::combined_test {
namespace {

TESSERA_LOOPS(Combined, all_setups);

void step_with(Trainer& run, const at::Tensor& loss) {
  run.note(loss.detach());
  loss.backward();
  run.optimizer().step();
  run.optimizer().zero_grad();
}

void set_frozen(torch::nn::Module& module, bool frozen) {
  for (auto& parameter : module.parameters()) parameter.requires_grad_(!frozen);
}

// ---- schedules

TEST_P(Combined, LayersThawOneAfterAnotherWhileGradientsAccumulate) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    auto& net = mlp_of(*run.model);
    set_frozen(*net.fc1, true);
    set_frozen(*net.fc2, true);
    for (int step = 0; step < 5; ++step) {
      if (step == 1) set_frozen(*net.fc2, false);
      if (step == 3) set_frozen(*net.fc1, false);
      {
        const Scope alone = run.no_sync();
        (run.loss(2 * step) / 2).backward();
      }
      step_with(run, run.loss(2 * step + 1) / 2);
    }
  });
}

// In the middle of what is accumulated.
TEST_P(Combined, ALayerThawsBetweenTwoParts) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    auto& net = mlp_of(*run.model);
    for (int step = 0; step < 4; ++step) {
      set_frozen(*net.fc2, step % 2 == 0);
      {
        const Scope alone = run.no_sync();
        run.loss(2 * step).backward();
      }
      set_frozen(*net.fc2, step % 2 == 1);
      step_with(run, run.loss(2 * step + 1));
    }
  });
}

}  // namespace
}  // namespace tessera::loops::combined_test
