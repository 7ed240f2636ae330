// Units so large that ranks which read memory of peers gather them late.
#include "tests/loops/loops.h"

#include <limits>
#include <sstream>

namespace tessera::loops::large_test {
using namespace internal;
namespace {

TESSERA_LOOPS(LargeUnits, all_setups);

// So large that ranks which read each other's memory gather and reduce them when they are needed, not before.
struct Large : Net {
  Large() { register_module("in", in), register_module("wide", wide), register_module("again", again); }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor h = again(wide(in(x).tanh()).tanh()).tanh();
    return torch::nn::functional::linear(h, in->weight.t());
  }
  torch::nn::Linear in{kFeatures, 264}, wide{264, 264}, again{264, 264};
};

Play large() {
  return {.model = [] { return seeded_model<Large>(25); }};
}

TEST_P(LargeUnits, LargeOnesInEveryOrder) {
  play(GetParam(), large(), [](Trainer& run) {
    run.train(0);
    run.optimizer().zero_grad();
    const at::Tensor one = run.loss(1), other = run.loss(2);
    {
      const torch::NoGradGuard no_grad;
      run.note(run.loss(3));
    }
    {
      auto scope = run.no_sync();
      other.backward({}, /*keep_graph=*/true);
    }
    (one + 0.5 * other).backward();
    run.optimizer().step();
    run.train(4);
  });
}

TEST_P(LargeUnits, LargeOnesAfterABackwardThatThrew) {
  play(GetParam(), large(), [](Trainer& run) {
    run.train(0);
    run.optimizer().zero_grad();
    const auto weight = dynamic_cast<Large&>(*run.model).wide->weight;
    bool throws = true;
    weight.register_hook([&throws](const at::Tensor&) {
      if (throws) throw std::runtime_error("the user's hook");
    });
    try {
      run.loss(1).backward();
    } catch (const std::runtime_error&) {
    }
    throws = false;
    run.optimizer().zero_grad();
    run.train(2);
    run.train(3);
  });
}

// Has so many large units that they are evicted as backward begins.
struct ManyLarge : Net {
  ManyLarge() {
    register_module("in", in), register_module("middle", middle), register_module("out", out);
    for (int i = 0; i < 8; ++i) middle->push_back(torch::nn::Linear(264, 264));
  }
  at::Tensor forward(const at::Tensor& x) override {
    at::Tensor h = in(x).tanh();
    for (const auto& layer : *middle) h = h + 0.1 * layer->as<torch::nn::Linear>()->forward(h).tanh();
    return out(h);
  }
  torch::nn::Linear in{kFeatures, 264}, out{264, kFeatures};
  torch::nn::ModuleList middle;
};

TEST_P(LargeUnits, ManyLargeOnesWithAValidationBeforeBackwardAndValuesOfBefore) {
  play(GetParam(), {.model = [] { return seeded_model<ManyLarge>(26); }}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor loss = run.loss(step);
      {
        const torch::NoGradGuard no_grad;
        run.note(run.loss(step + 5));
      }
      loss.backward();
      run.optimizer().step();
      const torch::NoGradGuard no_grad;
      for (auto& parameter : run.parameters()) parameter.copy_(parameter * 0.99);
    }
  });
}

}  // namespace
}  // namespace tessera::loops::large_test
