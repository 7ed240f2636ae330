// Tensors that share a parameter's memory, or a parameter that takes another's; gradients put where others look for
// them.
#include "tests/loops/loops.h"

namespace tessera::loops::aliases_test {
namespace {

TESSERA_LOOPS(Aliases, all_setups);

Expect unless_sharded() {
  const auto* test = testing::UnitTest::GetInstance()->current_test_info();
  const std::string name = test->name();
  const bool is_sharded = name.find("/fsdp") != std::string::npos || name.find("/zero3") != std::string::npos;
  return is_sharded ? Expect::kRefused : Expect::kEqual;
}

const std::vector<std::string> kOldMemory{"a tensor that shares memory with parameter '"};
const std::vector<std::string> kByHand{"has a gradient that was put there by hand"};

template <class Module>
std::function<Model()> seeded_double(uint64_t seed) {
  return [seed] { return seeded(seed, []() -> Model { return std::make_shared<Module>(); }); };
}

// ---- views that a module keeps

// In fp64 from the start: to() would give the weight other memory than the view's.
struct TwoWeights : Net {
  TwoWeights() {
    first = register_parameter("first", torch::randn({kFeatures, kFeatures}, at::kDouble) / 3);
    second = register_parameter("second", torch::randn({kFeatures, kFeatures}, at::kDouble) / 3);
  }
  at::Tensor forward(const at::Tensor& x) override { return x.matmul(first).tanh().matmul(second); }
  at::Tensor first, second;
};

struct WithViewAsBuffer : TwoWeights {
  WithViewAsBuffer() { turned = register_buffer("turned", first.detach().t()); }
  at::Tensor forward(const at::Tensor& x) override { return TwoWeights::forward(x).matmul(turned); }
  at::Tensor turned;
};

TEST_P(Aliases, ABufferThatIsAWeightTurned) {
  play(GetParam(),
       {.expect = unless_sharded(),
        .model = seeded_double<WithViewAsBuffer>(61),
        .says = {"FullyShardedDataParallel: buffer 'turned'"}},
       three_steps);
}

// As decoders are tied to embeddings: made once, and part of the graph.
struct WithViewAsMember : TwoWeights {
  at::Tensor forward(const at::Tensor& x) override { return TwoWeights::forward(x).matmul(turned); }
  at::Tensor turned = first.t();
};

TEST_P(Aliases, AMemberThatIsAWeightTurned) {
  play(GetParam(), {.expect = unless_sharded(), .model = seeded_double<WithViewAsMember>(62), .says = kOldMemory},
       three_steps);
}

struct WithDetachedMember : TwoWeights {
  at::Tensor forward(const at::Tensor& x) override { return TwoWeights::forward(x) + kept; }
  at::Tensor kept = first.detach().select(0, 1);
};

TEST_P(Aliases, AMemberThatIsAPartOfAWeight) {
  play(GetParam(), {.expect = unless_sharded(), .model = seeded_double<WithDetachedMember>(63), .says = kOldMemory},
       three_steps);
}

TEST_P(Aliases, AViewTakenBeforeWrapping) {
  play(GetParam(), {.expect = unless_sharded(), .model = seeded_double<WithDetachedMember>(64), .says = kOldMemory},
       [](Trainer& run) {
         const at::Tensor kept = dynamic_cast<WithDetachedMember&>(*run.model).kept;
         for (int step = 0; step < 3; ++step) {
           run.note(kept.square().mean());
           run.optimizer().zero_grad();
           run.loss(step).backward();
           run.optimizer().step();
         }
       });
}

// What somebody watches goes on to be the weight, also where another one has been given other memory meanwhile.
TEST_P(Aliases, AViewTakenAfterWrappingWhileAnotherWeightMoves) {
  const bool is_sharded = unless_sharded() == Expect::kRefused;
  play(GetParam(), {.expect = is_sharded ? Expect::kEither : Expect::kEqual, .model = seeded_double<TwoWeights>(68)},
       [](Trainer& run) {
         auto& net = dynamic_cast<TwoWeights&>(*run.model);
         const at::Tensor watched = net.first.detach();
         for (int step = 0; step < 5; ++step) {
           run.train(step);
           if (step == 1 || step == 3) net.second.set_data(net.second.detach().clone());
           run.note(watched.square().mean());
           run.note(net.first.detach().square().mean());
         }
       });
}

// All parameters were cut from one vector, as a program does that has sent them itself. Nobody uses it any more.
TEST_P(Aliases, AVectorThatParametersWereCutFrom) {
  struct WithVector : TwoWeights {
    at::Tensor vector;
  };
  auto model = [] {
    return seeded(65, []() -> Model {
      auto net = std::make_shared<WithVector>();
      net->vector = torch::nn::utils::parameters_to_vector(net->parameters()).detach();
      torch::nn::utils::vector_to_parameters(net->vector, net->parameters());
      return net;
    });
  };
  play(GetParam(), {.model = model}, three_steps);
}

// Two models over one memory: what the one learns the other knows.
TEST_P(Aliases, ASecondModelOverTheSameMemory) {
  play(GetParam(),
       {.expect = unless_sharded(),
        .model = seeded_double<TwoWeights>(66),
        .says = {"is sharded already, by another wrapper"}},
       [](Trainer& run) {
         auto twin = std::make_shared<TwoWeights>();
         const auto from = run.model->parameters();
         for (size_t i = 0; i < from.size(); ++i) twin->parameters()[i].set_data(from[i].data());
         auto other = run.another(twin);
         for (int step = 0; step < 3; ++step) {
           run.train(step);
           other->train(step + 3);
         }
         run.note_state(*other);
       });
}

struct WithExpandedBuffers : TwoWeights {
  WithExpandedBuffers() {
    scale = register_buffer("scale", torch::full({1}, 0.5, at::kDouble).expand({kFeatures}));
    mask = register_buffer("mask", torch::ones({1, kFeatures}, at::kBool).expand({3, kFeatures}));
  }
  at::Tensor forward(const at::Tensor& x) override {
    return TwoWeights::forward(x) * scale * mask.to(at::kDouble).sum(0);
  }
  at::Tensor scale, mask;
};

TEST_P(Aliases, ExpandedBuffers) { play(GetParam(), {.model = seeded_double<WithExpandedBuffers>(67)}, three_steps); }

// ---- parameters that take each other's data

void swap_data(at::Tensor a, at::Tensor b) {
  const at::Tensor of_a = a.data();
  a.set_data(b.data());
  b.set_data(of_a);
}

TEST_P(Aliases, TwoWeightsOfAModelSwapTheirData) {
  const Expect expect = unless_sharded() == Expect::kEqual ? Expect::kEqual : Expect::kEither;
  play(GetParam(), {.expect = expect, .model = seeded_double<TwoWeights>(68)}, [](Trainer& run) {
    auto& net = dynamic_cast<TwoWeights&>(*run.model);
    for (int step = 0; step < 4; ++step) {
      run.train(step);
      if (step % 2 == 0) swap_data(net.first, net.second);
    }
  });
}

TEST_P(Aliases, TwoLayersSwapTheirMembers) {
  play(GetParam(), {}, [](Trainer& run) {
    Mlp& net = mlp_of(*run.model);
    for (int step = 0; step < 4; ++step) {
      run.train(step);
      std::swap(net.fc1->weight, net.fc2->weight);
    }
  });
}

TEST_P(Aliases, ATargetNetworkSwapsItsDataWithTheModel) {
  const Expect expect = unless_sharded() == Expect::kEqual ? Expect::kEqual : Expect::kEither;
  play(GetParam(), {.expect = expect, .model = seeded_double<TwoWeights>(69)}, [](Trainer& run) {
    const Model target = seeded_double<TwoWeights>(70)();
    for (int step = 0; step < 4; ++step) {
      run.train(step);
      for (size_t i = 0; i < target->parameters().size(); ++i)
        swap_data(target->parameters()[i], run.model->parameters()[i]);
      const torch::NoGradGuard no_grad;
      run.note(torch::mse_loss(target->forward(run.x(step)), run.y(step)));
    }
  });
}

TEST_P(Aliases, TwoTrainedModelsSwapTheirData) {
  const Expect expect = unless_sharded() == Expect::kEqual ? Expect::kEqual : Expect::kEither;
  play(GetParam(), {.expect = expect, .model = seeded_double<TwoWeights>(71)}, [](Trainer& run) {
    auto other = run.another(seeded_double<TwoWeights>(72)());
    for (int step = 0; step < 4; ++step) {
      run.train(step);
      other->train(step + 5);
      for (size_t i = 0; i < run.model->parameters().size(); ++i)
        swap_data(other->model->parameters()[i], run.model->parameters()[i]);
    }
    run.note_state(*other);
  });
}

// A view that was kept shows the values of before; the weight has others.
TEST_P(Aliases, AViewIsKeptWhileItsWeightTakesOtherData) {
  const Expect expect = unless_sharded() == Expect::kEqual ? Expect::kEqual : Expect::kEither;
  play(GetParam(), {.expect = expect, .model = seeded_double<TwoWeights>(73)}, [](Trainer& run) {
    auto& net = dynamic_cast<TwoWeights&>(*run.model);
    run.train(0);
    const at::Tensor kept = net.first.detach(), other = net.second.detach();
    net.first.set_data(torch::full({kFeatures, kFeatures}, 0.1, at::kDouble));
    for (int step = 1; step < 3; ++step) {
      run.train(step);
      run.note(kept.square().mean());
      run.note(other.square().mean());
    }
  });
}

// ---- gradients that are put there by hand, the same on all ranks

void put_gradients(Trainer& run, double factor) {
  for (at::Tensor& parameter : run.model->parameters())
    parameter.mutable_grad() = torch::full_like(parameter.detach(), factor);
}

TEST_P(Aliases, GradientsReplacedInTheModuleAfterBackward) {
  play(GetParam(), {.expect = unless_sharded(), .says = kByHand}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      put_gradients(run, 0.1 + step);
      run.optimizer().step();
    }
  });
}

TEST_P(Aliases, GradientsPutIntoTheModuleAfterZeroGradInTheLastStep) {
  for (const bool by_module : {false, true})
    play(GetParam(), {.expect = unless_sharded(), .says = kByHand}, [by_module](Trainer& run) {
      run.train(0);
      by_module ? run.model->zero_grad() : run.optimizer().zero_grad();
      put_gradients(run, 0.1);
      run.optimizer().step();
    });
}

TEST_P(Aliases, GradientsPutIntoTheModuleBeforeTheFirstForward) {
  play(GetParam(), {.expect = unless_sharded(), .says = kByHand}, [](Trainer& run) {
    put_gradients(run, 0.1);
    run.optimizer().step();
    run.train(0);
  });
}

TEST_P(Aliases, AGradientPutIntoTheModuleIsScaledByItsNorm) {
  play(GetParam(), {.expect = unless_sharded(), .says = kByHand}, [](Trainer& run) {
    run.train(0);
    run.model->zero_grad();
    put_gradients(run, 0.1);
    run.clip_grad_norm_(0.01);
    run.optimizer().step();
  });
}

}  // namespace
}  // namespace tessera::loops::aliases_test
