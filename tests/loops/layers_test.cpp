// Layers of many kinds.
#include "tests/loops/loops.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/library.h>
#include <future>
#include <limits>
#include <optional>
#include <semaphore>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace tessera::loops::layers_test {
using namespace internal;
namespace {

TESSERA_LOOPS(Layers, all_setups);

// Computes a weight from other parameters, as weight norm does, and reads the data of one of them.
struct Normalised : Net {
  Normalised() {
    register_module("fc1", fc1);
    g = register_parameter("g", torch::ones({kFeatures, 1}));
    v = register_parameter("v", torch::randn({kFeatures, kFeatures}));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor weight = g * v / v.data().norm();
    return torch::nn::functional::linear(fc1(x).tanh(), weight, fc1->bias) + x.matmul(fc1->weight[0].unsqueeze(1));
  }
  torch::nn::Linear fc1{kFeatures, kFeatures};
  at::Tensor g, v;
};

TEST_P(Layers, WeightsComputedFromOthersAndTheirData) {
  auto model = [] { return seeded(12, []() -> Model { return std::make_shared<Normalised>(); }); };
  play(GetParam(), {.model = model}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

struct Mixed : Net {
  Mixed() {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
    numbers = register_parameter("numbers", at::arange(kFeatures), /*requires_grad=*/false);
    flags = register_parameter("flags", at::ones({3}, at::kBool), /*requires_grad=*/false);
    fc1->to(at::kFloat);
    fc2->to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) override {
    return fc2(fc1(x.to(at::kFloat)).tanh().to(at::kDouble) + numbers / kFeatures) * flags.sum() / 3;
  }
  torch::nn::Linear fc1{kFeatures, kFeatures}, fc2{kFeatures, kFeatures};
  at::Tensor numbers, flags;
};

TEST_P(Layers, ParametersOfManyTypes) {
  auto model = [] { return seeded(13, []() -> Model { return std::make_shared<Mixed>(); }); };
  play(GetParam(), {.expect = Expect::kEither, .model = model, .same_data = true, .optimizers = {Optim::kSgd}},
       [](Trainer& run) {
         for (int step = 0; step < 3; ++step) run.train(step);
       });
}

struct Dictionary : Net {
  Dictionary() {
    register_module("layers", layers);
    for (const char* name : {"a", "b", "c"})
      layers->update(std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>{
          {name, torch::nn::Linear(kFeatures, kFeatures).ptr()}});
  }
  at::Tensor forward(const at::Tensor& x) override {
    at::Tensor h = x;
    for (auto& layer : layers->values()) h = layer->as<torch::nn::LinearImpl>()->forward(h).tanh();
    return h;
  }
  torch::nn::ModuleDict layers;
};

TEST_P(Layers, ModulesInADictionary) {
  play(GetParam(), {.model = [] { return seeded_model<Dictionary>(34); }}, three_steps);
}

struct WeightNormed : Net {
  WeightNormed() {
    g = register_parameter("g", torch::ones({kFeatures, 1}));
    v = register_parameter("v", torch::randn({kFeatures, kFeatures}));
    register_module("out", out);
  }
  at::Tensor forward(const at::Tensor& x) override {
    return out(torch::linear(x, torch::_weight_norm(v, g, 0)).tanh());
  }
  at::Tensor g, v;
  torch::nn::Linear out{kFeatures, kFeatures};
};

TEST_P(Layers, WeightNorm) {
  play(GetParam(), {.model = [] { return seeded_model<WeightNormed>(35); }}, three_steps);
}

// Two layers use one weight, one of them transposed; other weights are used in parts.
struct ByParts : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor both = torch::cat({fc1->weight, fc2->weight.slice(0, 2, 6)});
    const at::Tensor h =
        torch::tanh(torch::nn::functional::linear(x, both)).index({torch::indexing::Ellipsis, torch::arange(8)});
    return torch::einsum("bi,ij->bj", {h, fc1->weight}) + fc2(h).select(1, 0).unsqueeze(1) * fc3->bias[2] +
           fc3->weight.masked_fill(fc3->weight.detach() > 0, 0).diagonal();
  }
};

TEST_P(Layers, WeightsByParts) {
  play(GetParam(), {.model = [] { return seeded_model<ByParts>(41); }, .unused = true}, three_steps);
}

// A parameter without dimensions, one without elements, and one that no step uses.
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

TEST_P(Layers, ANumberAndNothing) {
  play(GetParam(), {.model = [] { return seeded_model<Odd>(42); }, .unused = true}, three_steps);
}

// A schedule skips layers, in some steps the first one. It is equal on all ranks.
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

TEST_P(Layers, LayersLeftOutByASchedule) {
  play(GetParam(), {.model = [] { return seeded_model<Skipping>(43); }, .unused = true}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      dynamic_cast<Skipping&>(*run.model).step = static_cast<size_t>(step);
      run.train(step);
    }
  });
}

struct Dropping : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor h = fc1(x).tanh();
    if (!is_training()) return fc3(fc2(h));
    auto generator = at::make_generator<at::CPUGeneratorImpl>(calls++);
    return fc3(fc2(h * torch::empty_like(h).bernoulli_(0.5, generator) * 2));
  }
  uint64_t calls = 7;
};

TEST_P(Layers, DropoutFromAGeneratorOfItsOwn) {
  play(GetParam(), {.model = [] { return seeded_model<Dropping>(46); }, .same_data = true}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.model->train();
      run.train(step);
      run.model->eval();
      const torch::NoGradGuard no_grad;
      run.note(run.loss(9));
    }
  });
}

struct Counting : Mlp {
  Counting() {
    mean = register_buffer("mean", torch::zeros({kFeatures}));
    calls = register_buffer("calls", torch::zeros({}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) override {
    if (is_training()) {
      const torch::NoGradGuard no_grad;
      calls.add_(1);
      mean.mul_(0.9).add_(x.mean(0), 0.1);
    }
    return fc3(fc2(fc1(x - mean).tanh()).tanh() / calls);
  }
  at::Tensor mean, calls;
};

TEST_P(Layers, BuffersThatForwardChanges) {
  play(GetParam(), {.model = [] { return seeded_model<Counting>(47); }, .same_data = true}, three_steps);
}

// Spectral norm: a step of power iteration in each forward.
struct Spectral : Mlp {
  Spectral() { u = register_buffer("u", torch::ones({kFeatures}) / kFeatures); }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor& weight = fc2->weight;
    at::Tensor v;
    {
      const torch::NoGradGuard no_grad;
      v = weight.t().mv(u);
      v /= v.norm() + 1e-12;
      if (is_training()) u.copy_(weight.mv(v) / (weight.mv(v).norm() + 1e-12));
    }
    const at::Tensor sigma = u.clone().dot(weight.mv(v));
    return fc3(torch::nn::functional::linear(fc1(x).tanh(), weight / sigma, fc2->bias));
  }
  at::Tensor u;
};

TEST_P(Layers, SpectralNorm) {
  play(GetParam(), {.model = [] { return seeded_model<Spectral>(48); }}, three_steps);
}

// A parameter without dimensions, and one without elements.
struct Tempered : Mlp {
  Tempered() {
    scale = register_parameter("scale", torch::tensor(1.5));
    nothing = register_parameter("nothing", torch::zeros({0, kFeatures}));
  }
  at::Tensor forward(const at::Tensor& x) override {
    return fc3(fc2(fc1(x) * scale).tanh()) + nothing.sum() + torch::logsumexp(scale.view({1}), 0);
  }
  at::Tensor scale, nothing;
};

TEST_P(Layers, ATemperatureAndAnEmptyParameter) {
  play(GetParam(), {.model = [] { return seeded_model<Tempered>(50); }}, three_steps);
}

struct Others : Net {
  Others() : encoder(torch::nn::TransformerEncoderOptions(layer(), 2)), decoder(decoder_options()) {
    register_module("bilinear", bilinear), register_module("slope", slope), register_module("norm", norm);
    register_module("encoder", encoder), register_module("decoder", decoder);
  }
  static torch::nn::TransformerEncoderLayer layer() {
    return torch::nn::TransformerEncoderLayer(
        torch::nn::TransformerEncoderLayerOptions(kFeatures / 2, 2).dim_feedforward(6).dropout(0));
  }
  static torch::nn::TransformerDecoderOptions decoder_options() {
    return torch::nn::TransformerDecoderOptions(
        torch::nn::TransformerDecoderLayer(
            torch::nn::TransformerDecoderLayerOptions(kFeatures / 2, 2).dim_feedforward(6).dropout(0)),
        1);
  }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor h = slope(bilinear(x, x.flip(1)));
    const at::Tensor sequence = norm(h.unsqueeze(2)).view({x.size(0), 2, kFeatures / 2}).transpose(0, 1);
    return decoder(sequence, encoder(sequence)).transpose(0, 1).reshape({x.size(0), kFeatures});
  }
  torch::nn::Bilinear bilinear{kFeatures, kFeatures, kFeatures};
  torch::nn::PReLU slope;
  torch::nn::GroupNorm norm{torch::nn::GroupNormOptions(2, kFeatures)};
  torch::nn::TransformerEncoder encoder;
  torch::nn::TransformerDecoder decoder;
};

TEST_P(Layers, BilinearLayersAndTransformers) {
  play(GetParam(), {.model = [] { return seeded_model<Others>(51); }}, three_steps);
}

// The learning rate has one significant bit. torch's SGD rounds its product with a bfloat16 gradient in the remainder
// of a vector, but not within vectors, and shards cut vectors elsewhere. With one bit there is nothing to round.
TEST_P(Layers, HalfTheModelInBfloat16) {
  struct HalfHalf : Net {
    HalfHalf() {
      register_module("fc1", fc1), register_module("fc2", fc2);
      fc1->to(at::kBFloat16), fc2->to(at::kDouble);
    }
    at::Tensor forward(const at::Tensor& x) override { return fc2(fc1(x.to(at::kBFloat16)).to(at::kDouble).tanh()); }
    torch::nn::Linear fc1{kFeatures, kFeatures}, fc2{kFeatures, kFeatures};
  };
  auto model = [] { return seeded(56, []() -> Model { return std::make_shared<HalfHalf>(); }); };
  play(GetParam(), {.model = model, .same_data = true, .optimizers = {Optim::kSgd}}, [](Trainer& run) {
    for (auto& group : run.optimizer().param_groups()) group.options().set_lr(0.125);
    three_steps(run);
  });
}

// LSTM and GRU keep their weights in a list of their own, too.
struct Recurrent : Net {
  Recurrent() { register_module("lstm", lstm), register_module("gru", gru), register_module("out", out); }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor sequence = x.view({x.size(0), 4, kFeatures / 4});
    const auto [hidden, state] = lstm(sequence);
    return out(std::get<0>(gru(hidden)).select(1, 3));
  }
  torch::nn::LSTM lstm{torch::nn::LSTMOptions(kFeatures / 4, 6).num_layers(2).batch_first(true)};
  torch::nn::GRU gru{torch::nn::GRUOptions(6, 5).batch_first(true).bidirectional(true)};
  torch::nn::Linear out{10, kFeatures};
};

TEST_P(Layers, RecurrentOnes) {
  play(GetParam(), {.model = [] { return seeded_model<Recurrent>(21); }}, three_steps);
}

// Parameters that reductions take in several blocks, with a rest that differs from rank to rank.
struct WideInside : Net {
  WideInside() { register_module("in", in), register_module("out", out); }
  at::Tensor forward(const at::Tensor& x) override { return out(in(x).tanh()); }
  torch::nn::Linear in{kFeatures, 773};
  torch::nn::Linear out{773, kFeatures};
};

// Two backwards before each step, a forward that fails and is given up, and a look at validation data in between.
TEST_P(Layers, WideOnes) {
  play(GetParam(), {.model = [] { return seeded_model<WideInside>(31); }}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      run.loss(2 * step).backward();
      EXPECT_ANY_THROW(run(torch::ones({2, kFeatures + 1}, at::kDouble)));
      {
        const at::NoGradGuard no_grad;
        run.note(run.loss(step + 10));
      }
      const at::Tensor loss = run.loss(2 * step + 1);
      run.note(loss);
      loss.backward();
      run.optimizer().step();
    }
  });
}

// The output of a step is the input of the next one.
TEST_P(Layers, TruncatedBackpropagationThroughTime) {
  play(GetParam(), {.model = [] { return seeded_model<Recurrent>(22); }}, [](Trainer& run) {
    at::Tensor hidden = torch::zeros({}, at::kDouble);
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor out = run(run.x(step) + hidden);
      const at::Tensor loss = torch::mse_loss(out, run.y(step));
      run.note(loss);
      loss.backward();
      run.optimizer().step();
      hidden = out.detach().tanh();
    }
  });
}

struct Attentive : Net {
  Attentive() { register_module("attention", attention), register_module("layer", layer); }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor sequence = x.view({x.size(0), 2, kFeatures / 2}).transpose(0, 1);
    const at::Tensor seen = std::get<0>(attention(sequence, sequence, sequence));
    return layer(seen).transpose(0, 1).reshape({x.size(0), kFeatures});
  }
  torch::nn::MultiheadAttention attention{torch::nn::MultiheadAttentionOptions(kFeatures / 2, 2)};
  torch::nn::TransformerEncoderLayer layer{
      torch::nn::TransformerEncoderLayerOptions(kFeatures / 2, 2).dim_feedforward(6).dropout(0)};
};

TEST_P(Layers, AttentionAndATransformersLayer) {
  play(GetParam(), {.model = [] { return seeded_model<Attentive>(23); }}, three_steps);
}

struct Words : Net {
  explicit Words(bool is_sparse)
      : words(torch::nn::EmbeddingOptions(16, kFeatures).sparse(is_sparse)),
        bags(torch::nn::EmbeddingBagOptions(16, kFeatures).mode(torch::kMean).sparse(is_sparse)) {
    register_module("words", words), register_module("bags", bags), register_module("out", out);
  }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor ids = (x.detach().abs() * 100).to(at::kLong).remainder(16);
    return out(words(ids.select(1, 0)) + bags(ids));
  }
  torch::nn::Embedding words;
  torch::nn::EmbeddingBag bags;
  torch::nn::Linear out{kFeatures, kFeatures};
};
struct DenseWords : Words {
  DenseWords() : Words(false) {}
};
struct SparseWords : Words {
  SparseWords() : Words(true) {}
};

TEST_P(Layers, Embeddings) {
  play(GetParam(), {.model = [] { return seeded_model<DenseWords>(24); }}, three_steps);
}

TEST_P(Layers, SparseGradients) {
  play(GetParam(),
       {.expect = Expect::kEither, .model = [] { return seeded_model<SparseWords>(24); }, .optimizers = {Optim::kSgd}},
       three_steps);
}

struct Lists : Net {
  Lists() {
    register_module("scales", scales), register_module("shifts", shifts), register_module("layers", layers);
    for (int i = 0; i < 3; ++i) {
      scales->append(torch::rand({kFeatures}) + 0.5);
      shifts->insert("shift_" + std::to_string(i), torch::randn({kFeatures}));
      layers->push_back(torch::nn::Linear(kFeatures, kFeatures));
    }
  }
  at::Tensor forward(const at::Tensor& x) override {
    at::Tensor h = x;
    for (int i = 0; i < 3; ++i)
      h = (layers[i]->as<torch::nn::Linear>()->forward(h) * (*scales)[i] + (*shifts)["shift_" + std::to_string(i)])
              .tanh();
    return h;
  }
  torch::nn::ParameterList scales;
  torch::nn::ParameterDict shifts;
  torch::nn::ModuleList layers;
};

TEST_P(Layers, ParametersAndModulesInLists) {
  play(GetParam(), {.model = [] { return seeded_model<Lists>(25); }}, three_steps);
}

// Weights that are used as their conjugates, so that their gradients are lazy conjugates.
struct Conjugated : Net {
  Conjugated() {
    register_module("fc", fc);
    fc->to(at::kDouble);
    square = register_parameter("square", torch::randn({kFeatures, kFeatures}, at::kComplexDouble));
    scale = register_parameter("scale", torch::randn({kFeatures}, at::kComplexDouble));
  }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor h = fc(x).tanh(), turned = scale.conj();
    return at::real(h.to(at::kComplexDouble).matmul(square.mH())) + h * at::real(turned) +
           h.square() * at::imag(turned);
  }
  torch::nn::Linear fc{kFeatures, kFeatures};
  at::Tensor square, scale;
};

TEST_P(Layers, WeightsUsedAsTheirConjugates) {
  auto model = [] { return seeded(36, []() -> Model { return std::make_shared<Conjugated>(); }); };
  for (const bool clips : {false, true})
    play(GetParam(), {.model = model}, [clips](Trainer& run) {
      for (int step = 0; step < 3; ++step) {
        run.optimizer().zero_grad();
        const at::Tensor loss = run.loss(step);
        run.note(loss);
        loss.backward();
        if (clips) run.notes.push_back(run.clip_grad_norm_(0.05));
        run.optimizer().step();
      }
    });
}

struct Convolutional : Net {
  Convolutional() { register_module("layers", layers), register_module("out", out); }
  at::Tensor forward(const at::Tensor& x) override {
    return out(layers->forward(x.view({x.size(0), 2, 2, kFeatures / 4})).flatten(1));
  }
  torch::nn::Sequential layers{torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3).padding(1).groups(2)),
                               torch::nn::GroupNorm(torch::nn::GroupNormOptions(2, 4)),
                               torch::nn::Functional(torch::relu),
                               torch::nn::ConvTranspose2d(torch::nn::ConvTranspose2dOptions(4, 3, 2)),
                               torch::nn::PReLU(),
                               torch::nn::InstanceNorm2d(torch::nn::InstanceNorm2dOptions(3).affine(true)),
                               torch::nn::Flatten()};
  torch::nn::Linear out{27, kFeatures};
};

TEST_P(Layers, ConvolutionsAndNorms) {
  play(GetParam(), {.model = [] { return seeded_model<Convolutional>(36); }}, three_steps);
}

// Computes in single precision, so results are compared with a larger tolerance.
struct Complex : Net {
  Complex() { register_module("layer", layer); }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor h = layer(x.to(at::kFloat)).to(at::kComplexFloat).matmul(weight);
    return (torch::view_as_real(h).sum(-1) + h.abs()).to(at::kDouble);
  }
  torch::nn::Linear layer{kFeatures, kFeatures};
  at::Tensor weight = register_parameter("weight", torch::randn({kFeatures, kFeatures}, at::kComplexFloat));
};

TEST_P(Layers, ComplexWeight) {
  auto complex = [] { return seeded(4, []() -> Model { return std::make_shared<Complex>(); }); };
  play(GetParam(), {.model = complex}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

struct Lookup : Net {
  explicit Lookup(double max_norm)
      : table(torch::nn::EmbeddingOptions(10, kFeatures).max_norm(max_norm)), out(kFeatures, kFeatures) {
    register_module("table", table);
    register_module("out", out);
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) override {
    return out(table((x.select(1, 0).abs() * 4).to(at::kLong).clamp_max(9)));
  }
  torch::nn::Embedding table;
  torch::nn::Linear out;
};

// Forward changes the rows of the weight that it looks up.
TEST_P(Layers, EmbeddingWithMaxNorm) {
  auto lookup = [] { return seeded(5, []() -> Model { return std::make_shared<Lookup>(0.5); }); };
  play(GetParam(), {.expect = Expect::kEither, .model = lookup, .same_data = true}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

struct Normed : Net {
  Normed() {
    register_module("fc1", fc1);
    register_module("norm", norm);
    register_module("fc2", fc2);
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) override { return fc2(norm(fc1(x)).tanh()); }
  torch::nn::Linear fc1{kFeatures, kFeatures}, fc2{kFeatures, kFeatures};
  torch::nn::BatchNorm1d norm{kFeatures};
};
Model normed() {
  return seeded(6, []() -> Model { return std::make_shared<Normed>(); });
}

// The second forward must not write into buffers that the first one's backward needs.
TEST_P(Layers, BatchNormWithTwoForwardsBeforeOneBackward) {
  play(GetParam(), {.model = normed, .same_data = true}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      (run.loss(2 * step) + run.loss(2 * step + 1)).backward();
      run.optimizer().step();
    }
  });
}

TEST_P(Layers, BatchNormTrainedEvaluatedAndTrained) {
  play(GetParam(), {.model = normed, .same_data = true}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.model->train();
      run.train(step);
      run.model->eval();
      torch::NoGradGuard no_grad;
      run.note(run.loss(9));
    }
    // In evaluation mode, and with a gradient: statistics stay as they are.
    run.train(3);
  });
}

}  // namespace
}  // namespace tessera::loops::layers_test
