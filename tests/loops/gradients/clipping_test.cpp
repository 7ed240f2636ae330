// Gradients clipped by norm or by value.
#include "tests/loops/loops.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <limits>
#include <map>
#include <semaphore>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include "tests/loops/failing_backward.h"

namespace tessera::loops::clipping_test {
using namespace internal;
namespace {

TESSERA_LOOPS(Clipping, all_setups);

TEST_P(Clipping, GradientsClippedByValue) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      torch::nn::utils::clip_grad_value_(run.parameters(), 1e-2);
      run.optimizer().step();
    }
  });
}

// Adaptive clipping: each rank computes the limit, which is equal on all ranks.
TEST_P(Clipping, ClippingToAPartOfTheNormBefore) {
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

TEST_P(Clipping, ClippedByValueThroughTheModule) {
  play(GetParam(),
       {.expect = is_sharded(GetParam()) ? Expect::kRefused : Expect::kEqual, .says = {"is in the wrapper's shards"}},
       [](Trainer& run) {
         for (int step = 0; step < 3; ++step) {
           run.optimizer().zero_grad();
           run.loss(step).backward();
           torch::nn::utils::clip_grad_value_(run.model->parameters(), 1e-2);
           run.optimizer().step();
         }
       });
}

// Norms are computed by rows: some weights have a whole number of these rows, others a remainder.
struct Narrower : Net {
  Narrower() { register_module("narrow", narrow), register_module("wide", wide), register_module("last", last); }
  at::Tensor forward(const at::Tensor& x) override { return last(wide(narrow(x).tanh()).tanh()); }
  torch::nn::Linear narrow{torch::nn::LinearOptions(kFeatures, 6).bias(false)}, wide{6, kFeatures};
  torch::nn::Linear last{kFeatures, kFeatures};
};

TEST_P(Clipping, ClippedByAnyNorm) {
  play(GetParam(), {.model = [] { return seeded_model<Narrower>(23); }}, [](Trainer& run) {
    for (const double norm_type : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
      run.loss(static_cast<int>(norm_type == 2.0)).backward();
      run.notes.push_back(run.clip_grad_norm_(0.05, norm_type));
      run.optimizer().step();
      run.optimizer().zero_grad();
    }
  });
}

TEST_P(Clipping, ClippedGradients) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      run.note(torch::tensor(run.clip_grad_norm_(0.1), at::kDouble));
      run.optimizer().step();
    }
  });
}

TEST_P(Clipping, ClippedGradientsAfterNoSync) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      {
        auto scope = run.no_sync();
        run.loss(2 * step).backward();
      }
      run.loss(2 * step + 1).backward();
      run.note(torch::tensor(run.clip_grad_norm_(0.1), at::kDouble));
      run.optimizer().step();
    }
  });
}

// Refused: the gradients are a rank's own sums, so each rank would clip by its own norm.
TEST_P(Clipping, ClippedGradientsAfterNoSyncAlone) {
  play(GetParam(),
       {.expect = Expect::kRefused,
        .says = {"was made under no_sync() and has not been reduced", "is this rank's own sum"},
        .equal_alone = true},
       [](Trainer& run) {
         run.train(0);
         run.optimizer().zero_grad();
         {
           auto scope = run.no_sync();
           run.loss(1).backward();
         }
         run.note(torch::tensor(run.clip_grad_norm_(0.1), at::kDouble));
       });
}

// If ranks have parts of gradients, or only owners have gradients, torch's function computes this rank's norm.
void play_clipped_by_torch(const Setup& setup, const std::function<std::vector<at::Tensor>(Trainer&)>& parameters) {
  play(setup,
       {.expect = setup.stage >= 2 ? Expect::kRefused : Expect::kEqual,
        .says = {"is in the wrapper's shards", "would be scaled by a tensor that may come from its norm"},
        .equal_alone = true},
       [&](Trainer& run) {
         for (int step = 0; step < 3; ++step) {
           run.optimizer().zero_grad();
           run.loss(step).backward();
           torch::nn::utils::clip_grad_norm_(parameters(run), 0.1);
           run.optimizer().step();
         }
       });
}

TEST_P(Clipping, ClippedByTorchsFunctionOnTheModule) {
  play_clipped_by_torch(GetParam(), [](Trainer& run) { return run.model->parameters(); });
}

// The parameters that a user of a wrapper should give to an optimizer.
TEST_P(Clipping, ClippedByTorchsFunctionOnTheWrappersParameters) {
  play_clipped_by_torch(GetParam(), [](Trainer& run) { return run.parameters(); });
}

// Gradients that the loop sets are refused too, once a backward has added to them.
TEST_P(Clipping, ClippedByTorchsFunctionAfterGradientsOfTheLoopsOwn) {
  const auto clipped = [&](const std::function<void(Trainer&, int)>& before_clipping) {
    play(GetParam(),
         {.expect = GetParam().stage >= 2 ? Expect::kRefused : Expect::kEqual,
          .says = {"is in the wrapper's shards", "would be scaled by a tensor that may come from its norm",
                   kDropped[0]},  // at world 1
          .equal_alone = true},
         [&](Trainer& run) {
           for (int step = 0; step < 3; ++step) {
             before_clipping(run, step);
             torch::nn::utils::clip_grad_norm_(run.parameters(), 0.1);
             run.optimizer().step();
           }
         });
  };
  clipped([](Trainer& run, int step) {
    for (at::Tensor& parameter : run.parameters()) parameter.mutable_grad() = torch::zeros_like(parameter);
    run.loss(step).backward();
  });
  clipped([](Trainer& run, int step) {
    {
      auto scope = run.no_sync();
      run.loss(step).backward();
    }
    run.optimizer().zero_grad(false);
    run.loss(step).backward();
  });
}

}  // namespace
}  // namespace tessera::loops::clipping_test
