// Tensors that share memory with parameters.
#include "tests/loops/loops.h"

#include <ATen/CPUGeneratorImpl.h>
#include <semaphore>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace tessera::loops::shared_memory_test {
using namespace internal;
namespace {

TESSERA_LOOPS(SharedMemory, all_setups);

// A view of a weight, taken once after wrapping.
TEST_P(SharedMemory, AViewOfAWeightKeptOverSteps) {
  play(GetParam(), {}, [](Trainer& run) {
    const at::Tensor transposed = mlp_of(*run.model).fc2->weight.detach().t();
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      run.note(transposed.square().mean());
    }
  });
}

// A convolution, whose weight the test stores in channels-last order.
struct ChannelsLast : Net {
  ChannelsLast() { register_module("convolution", convolution), register_module("fc", fc); }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor image = x.view({x.size(0), 2, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast);
    return fc(convolution(image).tanh().flatten(1));
  }
  torch::nn::Conv2d convolution{torch::nn::Conv2dOptions(2, 4, 2)};
  torch::nn::Linear fc{4, kFeatures};
};

TEST_P(SharedMemory, WeightsInChannelsLast) {
  auto model = [] {
    Model net = seeded_model<ChannelsLast>(52);
    auto& weight = dynamic_cast<ChannelsLast&>(*net).convolution->weight;
    weight.set_data(weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
    return net;
  };
  play(GetParam(), {.model = model}, three_steps);
}

struct Strided : Net {
  Strided() {
    turned = register_parameter("turned", torch::randn({kFeatures, kFeatures}).t());
    every_other = register_parameter("every_other", torch::randn({kFeatures, 2 * kFeatures}).slice(1, 0, 99, 2));
  }
  at::Tensor forward(const at::Tensor& x) override { return x.matmul(turned).tanh().matmul(every_other); }
  at::Tensor turned, every_other;
};
struct Expanded : Strided {
  Expanded() { row = register_parameter("row", torch::randn({1, kFeatures}).expand({kFeatures, kFeatures})); }
  at::Tensor forward(const at::Tensor& x) override { return Strided::forward(x.matmul(row)); }
  at::Tensor row;
};

TEST_P(SharedMemory, WeightsThatAreViews) {
  auto model = [] {
    return seeded(53, []() -> Model {
      auto net = std::make_shared<Strided>();
      for (auto& parameter : net->parameters()) parameter.set_data(parameter.detach().to(at::kDouble));
      auto& wide = net->every_other;
      wide.set_data(torch::randn({kFeatures, 2 * kFeatures}, at::kDouble).slice(1, 0, 99, 2));
      return net;
    });
  };
  play(GetParam(), {.model = model}, three_steps);
}

// All rows share the memory of one, so torch's optimizers refuse to write to them.
TEST_P(SharedMemory, AnExpandedWeight) {
  auto model = [] {
    return seeded(54, []() -> Model {
      auto net = std::make_shared<Expanded>();
      net->to(at::kDouble);
      net->row.set_data(torch::randn({1, kFeatures}, at::kDouble).expand({kFeatures, kFeatures}));
      return net;
    });
  };
  play(GetParam(), {.expect = Expect::kEither, .model = model}, three_steps);
}

// One weight is the transpose of another, in the same memory.
TEST_P(SharedMemory, AWeightThatIsAnotherTurned) {
  auto model = [] {
    Model net = mlp();
    mlp_of(*net).fc3->weight.set_data(mlp_of(*net).fc1->weight.detach().t());
    return net;
  };
  play(GetParam(), {.expect = Expect::kEither, .model = model}, three_steps);
}

TEST_P(SharedMemory, WeightsThatOverlapInPart) {
  auto model = [] {
    Model net = mlp();
    const int64_t rows = 3 * kFeatures / 2;
    const at::Tensor memory = torch::linspace(-1, 1, rows * kFeatures, at::kDouble).sin().view({rows, kFeatures});
    mlp_of(*net).fc1->weight.set_data(memory.slice(0, 0, kFeatures));
    mlp_of(*net).fc3->weight.set_data(memory.slice(0, kFeatures / 2, 3 * kFeatures / 2));
    return net;
  };
  play(GetParam(), {.expect = Expect::kEither, .model = model}, three_steps);
}

TEST_P(SharedMemory, TwoParametersOfOneMemory) {
  auto shared = [] {
    Model model = mlp();
    mlp_of(*model).fc3->weight.set_data(mlp_of(*model).fc1->weight.data());
    return model;
  };
  play(GetParam(), {.expect = Expect::kEither, .model = shared}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

template <class Module>
std::function<Model()> seeded_double(uint64_t seed) {
  return [seed] { return seeded(seed, []() -> Model { return std::make_shared<Module>(); }); };
}

// A layer with a sparse matrix of learned values, as docs/fsdp.md says: of a copy of the parameter.
struct SparseLayer : Mlp {
  SparseLayer() { values = register_parameter("values", torch::linspace(0.5, 2, 4)); }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor indices = torch::tensor({{0, 1, 2, 3}, {1, 2, 3, 0}}, x.options().dtype(at::kLong));
    const at::Tensor sparse =
        at::sparse_coo_tensor(indices, values.clone(), {kFeatures, kFeatures}, x.options().layout(at::kSparse));
    return Mlp::forward(x) + torch::mm(sparse, fc1(x).t()).t();
  }
  at::Tensor values;
};

TEST_P(SharedMemory, ASparseMatrixOfACopyOfAWeight) {
  play(GetParam(), {.model = [] { return seeded_model<SparseLayer>(65); }}, three_steps);
}

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

TEST_P(SharedMemory, ABufferThatIsAWeightTurned) {
  play(GetParam(),
       {.expect = unless_sharded(GetParam()),
        .model = seeded_double<WithViewAsBuffer>(61),
        .says = {"FullyShardedDataParallel: buffer 'turned'"}},
       three_steps);
}

// All parameters are views of one vector, as in a program that has broadcast them itself. The vector is not used again.
TEST_P(SharedMemory, AVectorThatParametersWereCutFrom) {
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

// Two models over one memory: a step of one changes the other.
TEST_P(SharedMemory, ASecondModelOverTheSameMemory) {
  play(GetParam(),
       {.expect = unless_sharded(GetParam()),
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

TEST_P(SharedMemory, ExpandedBuffers) {
  play(GetParam(), {.model = seeded_double<WithExpandedBuffers>(67)}, three_steps);
}

void swap_data(at::Tensor a, at::Tensor b) {
  const at::Tensor of_a = a.data();
  a.set_data(b.data());
  b.set_data(of_a);
}

TEST_P(SharedMemory, TwoWeightsOfAModelSwapTheirData) {
  const Expect expect = unless_sharded(GetParam()) == Expect::kEqual ? Expect::kEqual : Expect::kEither;
  play(GetParam(), {.expect = expect, .model = seeded_double<TwoWeights>(68)}, [](Trainer& run) {
    auto& net = dynamic_cast<TwoWeights&>(*run.model);
    for (int step = 0; step < 4; ++step) {
      run.train(step);
      if (step % 2 == 0) swap_data(net.first, net.second);
    }
  });
}

TEST_P(SharedMemory, TwoLayersSwapTheirMembers) {
  play(GetParam(), {}, [](Trainer& run) {
    Mlp& net = mlp_of(*run.model);
    for (int step = 0; step < 4; ++step) {
      run.train(step);
      std::swap(net.fc1->weight, net.fc2->weight);
    }
  });
}

}  // namespace
}  // namespace tessera::loops::shared_memory_test
