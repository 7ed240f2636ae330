// Layers that only some ranks use.
#include "tests/loops/loops.h"

#include <limits>
#include <sstream>

namespace tessera::loops::experts_test {
using namespace internal;
namespace {

TESSERA_LOOPS(ExpertLayers, all_setups);

// Each row belongs to one of four experts. An expert without rows is not called.
struct Experts : Net {
  Experts() {
    for (int i = 0; i < 4; ++i) experts->push_back(torch::nn::Linear(kFeatures, kFeatures));
    register_module("gate", gate);
    register_module("experts", experts);
  }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor h = gate(x).tanh();
    const at::Tensor whose = (x.select(1, 0) > 0).to(at::kLong) + 2 * (x.select(1, 1) > 0).to(at::kLong);
    at::Tensor out = torch::zeros_like(h);
    for (int i = 0; i < 4; ++i) {
      const at::Tensor rows = (whose == i).nonzero().squeeze(1);
      if (rows.numel() > 0)
        out = out.index_add(0, rows, experts[i]->as<torch::nn::Linear>()->forward(h.index_select(0, rows)));
    }
    return out;
  }
  torch::nn::Linear gate{kFeatures, kFeatures};
  torch::nn::ModuleList experts;
};
const Play kExperts{.expect = Expect::kEither, .model = [] { return seeded_model<Experts>(301); }, .unused = true};

TEST_P(ExpertLayers, ExpertsThatSomeRanksHaveNoRowsFor) {
  if (GetParam().stage < 3) play(GetParam(), kExperts, three_steps);  // not in stage 3, which gathers units
}

TEST_P(ExpertLayers, ExpertsThatSomeRanksHaveNoRowsForEvaluated) {
  play(GetParam(), kExperts, [](Trainer& run) {
    const torch::NoGradGuard no_grad;
    for (int step = 0; step < 4; ++step) run.note(run.loss(step));
  });
}

// One unit, of which a rank's rows may need either expert, or both.
struct ExpertsImpl : torch::nn::LinearImpl {
  ExpertsImpl() : torch::nn::LinearImpl(kFeatures, kFeatures) {
    for (const char* name : {"low", "high"})
      experts.push_back(register_parameter(name, at::randn({kFeatures, kFeatures}) * 0.3));
  }
  at::Tensor route(const at::Tensor& x) {
    at::Tensor out = torch::nn::functional::linear(x, weight, bias).tanh();
    for (const bool is_high : {false, true}) {
      const at::Tensor rows = x.select(1, 0).gt(0.5).eq(is_high).nonzero().squeeze(1);
      if (rows.numel() == 0) continue;
      out = out.index_add(0, rows, torch::nn::functional::linear(x.index_select(0, rows), experts[is_high]));
    }
    return out;
  }
  std::vector<at::Tensor> experts;
};

struct MixtureOfExperts : Net {
  MixtureOfExperts() {
    for (int i = 0; i < 3; ++i) {
      blocks.push_back(std::make_shared<ExpertsImpl>());
      register_module("block" + std::to_string(i), blocks.back());
    }
  }
  at::Tensor forward(const at::Tensor& x) override {
    at::Tensor h = x;
    for (const auto& block : blocks) h = block->route(h);
    return h;
  }
  std::vector<std::shared_ptr<ExpertsImpl>> blocks;
};

// Under FSDP a rank that leaves out parameters of a unit may reduce the unit in another order than others.
Play mixture(const Setup& setup) {
  return {.expect = setup.stage == 3 ? Expect::kEither : Expect::kEqual,
          .model = [] { return seeded_model<MixtureOfExperts>(22); },
          .unused = true};
}

TEST_P(ExpertLayers, ExpertsThatSomeRanksUse) { play(GetParam(), mixture(GetParam()), three_steps); }

TEST_P(ExpertLayers, ExpertsThatSomeRanksUseInOneOfTwoBackwards) {
  play(GetParam(), mixture(GetParam()), [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      const at::Tensor one = run.loss(2 * step), other = run.loss(2 * step + 1);
      run.note(one.detach());
      {
        auto scope = run.no_sync();
        one.backward();
      }
      other.backward();
      run.optimizer().step();
      run.optimizer().zero_grad();
    }
  });
}

// The hook gives a gradient to a parameter that the outer pass does not reach.
TEST_P(ExpertLayers, AHookThatGoesBackwardThroughAnotherLoss) {
  Play play_of = mixture(GetParam());
  play_of.expect = Expect::kEither;
  play(GetParam(), play_of, [](Trainer& run) {
    for (int step = 0; step < 2; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor extra = run.loss(10 + step), out = run(run.x(step));
      out.register_hook([extra](const at::Tensor&) {
        const torch::AutoGradMode recording(true);
        extra.backward();
      });
      torch::mse_loss(out, run.y(step)).backward();
      run.optimizer().step();
    }
  });
}

}  // namespace
}  // namespace tessera::loops::experts_test
