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

TEST_P(Aliases, GradientsPutIntoTheModuleBeforeTheFirstForward) {
  play(GetParam(), {.expect = unless_sharded(), .says = kByHand}, [](Trainer& run) {
    put_gradients(run, 0.1);
    run.optimizer().step();
    run.train(0);
  });
}

}  // namespace
}  // namespace tessera::loops::aliases_test
