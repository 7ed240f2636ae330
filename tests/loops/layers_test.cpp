// libtorch's own layers that have several weights or keep them in ways of their own, and what people do with models
// between steps.
#include "tests/loops/loops.h"

#include <limits>
#include <sstream>

namespace tessera::loops {
using namespace internal;
namespace {

TESSERA_LOOPS(Layers, all_setups);

// Keeps its weights in a list of its own as well.
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

// What comes out of one step goes into the next.
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

// A member is not what is registered: fc3's own weight is left without a gradient, as by one process.
TEST_P(Layers, AMemberThatIsReplacedAndNotRegistered) {
  const auto model = [] {
    Model made = mlp();
    mlp_of(*made).fc3->weight = mlp_of(*made).fc1->weight;
    return made;
  };
  play(GetParam(), {.expect = Expect::kEither, .model = model, .unused = true}, three_steps);
}

TEST_P(Layers, OneLayerTwiceInAForward) {
  struct Twice : Mlp {
    at::Tensor forward(const at::Tensor& x) override { return fc2(fc1(fc2(fc1(x).tanh()).tanh())); }
  };
  play(GetParam(), {.model = [] { return seeded_model<Twice>(26); }, .unused = true}, three_steps);
}

struct Lazy : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    if (!late.defined()) late = register_parameter("extra", torch::full({kFeatures}, 0.5, at::kDouble));
    return Mlp::forward(x) * late;
  }
  at::Tensor late;
};

TEST_P(Layers, AParameterMadeByTheFirstForward) {
  play(GetParam(), {.expect = Expect::kEither, .model = [] { return seeded_model<Lazy>(27); }}, three_steps);
}

TEST_P(Layers, GradientsAskedForByTensor) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = run.loss(step);
      run.note(loss);
      const auto parameters = run.model->parameters();
      const auto gradients = torch::autograd::grad({loss}, parameters);
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < parameters.size(); ++i) parameters[i].sub_(0.1 * gradients[i]);
    }
  });
}

TEST_P(Layers, GradientsAskedForByTensorAndPutThereByHand) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = run.loss(step);
      run.note(loss);
      auto parameters = run.model->parameters();
      const auto gradients = torch::autograd::grad({loss}, parameters);
      for (size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = gradients[i];
      run.optimizer().step();
    }
  });
}

TEST_P(Layers, BackwardIntoSomeParametersOnly) {
  play(GetParam(), {.expect = Expect::kEither, .unused = true}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor loss = run.loss(step);
      run.note(loss);
      const auto wanted = mlp_of(*run.model).fc2->parameters();
      loss.backward({}, /*retain_graph=*/std::nullopt, /*create_graph=*/false, wanted);
      run.optimizer().step();
    }
  });
}

TEST_P(Layers, ValuesInitialisedAfterWrapping) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.model->apply([](torch::nn::Module& module) {
      const torch::NoGradGuard no_grad;
      if (auto* linear = module.as<torch::nn::Linear>()) {
        torch::nn::init::constant_(linear->weight, 0.1);
        torch::nn::init::zeros_(linear->bias);
      }
    });
    three_steps(run);
  });
}

TEST_P(Layers, TheBestValuesArePutBack) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    std::vector<at::Tensor> best;
    for (const auto& parameter : run.model->parameters()) best.push_back(parameter.detach().clone());
    run.train(1);
    run.train(2);
    {
      const torch::NoGradGuard no_grad;
      size_t i = 0;
      for (auto& parameter : run.model->parameters()) parameter.copy_(best[i++]);
    }
    run.train(3);
  });
}

TEST_P(Layers, NormsOfValuesAreLookedAt) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      for (const auto& entry : run.model->named_parameters()) run.note(entry.value().norm());
    }
  });
}

TEST_P(Layers, AGroupIsAddedWhenItsLayerIsThawed) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    run.optimizer().add_param_group(torch::optim::OptimizerParamGroup({torch::zeros({2}, at::kDouble)}));
    run.train(1);
  });
}

TEST_P(Layers, GradientsThroughTheOptimizersGroups) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor loss = run.loss(step);
      run.note(loss);
      loss.backward();
      for (auto& group : run.optimizer().param_groups())
        for (auto& parameter : group.params())
          if (parameter.grad().defined()) parameter.mutable_grad().mul_(0.5);
      run.optimizer().step();
    }
  });
}

TEST_P(Layers, TrainingAndEvaluatingInTurn) {
  struct Dropped : Mlp {
    at::Tensor forward(const at::Tensor& x) override { return is_training() ? Mlp::forward(x) : Mlp::forward(x * 0.5); }
  };
  play(GetParam(), {.model = [] { return seeded_model<Dropped>(28); }}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.model->train();
      run.train(step);
      run.model->eval();
      const torch::NoGradGuard no_grad;
      run.note(run.loss(step + 10));
    }
  });
}

// The sum of losses of several forwards, one backward.
TEST_P(Layers, LossesAddedUpOverMicroBatches) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    for (int step = 0; step < 2; ++step) {
      run.optimizer().zero_grad();
      at::Tensor sum = torch::zeros({}, at::kDouble);
      for (int micro = 0; micro < 3; ++micro) sum = sum + run.loss(3 * step + micro) / 3;
      run.note(sum);
      sum.backward();
      run.optimizer().step();
    }
  });
}

TEST_P(Layers, ALossOfGradientsBySecondBackward) {
  play(GetParam(), {.same_data = true}, [](Trainer& run) {
    for (int step = 0; step < 2; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor loss = run.loss(step);
      run.note(loss);
      at::Tensor penalty = torch::zeros({}, at::kDouble);
      for (const auto& gradient : torch::autograd::grad({loss}, run.model->parameters(), {}, true, true))
        penalty = penalty + gradient.square().sum();
      (loss + 0.1 * penalty).backward();
      run.optimizer().step();
    }
  });
}

// Curvature along the gradient, by which the step is scaled.
TEST_P(Layers, AHessianVectorProduct) {
  play(GetParam(), {.same_data = true}, [](Trainer& run) {
    for (int step = 0; step < 2; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor loss = run.loss(step);
      const auto parameters = run.model->parameters();
      const auto gradients = torch::autograd::grad({loss}, parameters, {}, true, true);
      at::Tensor along = torch::zeros({}, at::kDouble);
      for (const auto& gradient : gradients) along = along + (gradient * gradient.detach()).sum();
      at::Tensor curvature = torch::zeros({}, at::kDouble);
      for (const auto& product : torch::autograd::grad({along}, parameters, {}, true))
        curvature += product.square().sum();
      run.note(curvature);
      (loss / (1 + curvature.sqrt())).backward();
      run.optimizer().step();
    }
  });
}

// ---- what forward does with weights

// Gives the first layer no gradient, in two ways.
template <bool kDetaches>
struct Stopped : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    if (kDetaches) return fc3(fc2(fc1(x).tanh().detach()).tanh());
    at::Tensor features;
    {
      const torch::NoGradGuard no_grad;
      features = fc1(x).tanh();
    }
    return fc3(fc2(features).tanh());
  }
};

TEST_P(Layers, APartUnderNoGradInsideForward) {
  play(GetParam(), {.model = [] { return seeded_model<Stopped<false>>(31); }, .unused = true}, three_steps);
}

TEST_P(Layers, APartThatIsDetached) {
  play(GetParam(), {.model = [] { return seeded_model<Stopped<true>>(32); }, .unused = true}, three_steps);
}

// A user's own operator: what backward needs is saved as variables, or as it is.
template <bool kAsVariables>
struct OwnLinear : torch::autograd::Function<OwnLinear<kAsVariables>> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    if (kAsVariables) {
      context->save_for_backward({x, weight});
    } else {
      context->saved_data["x"] = x;
      context->saved_data["weight"] = weight;
    }
    return x.matmul(weight.t());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    at::Tensor x, weight;
    if (kAsVariables) {
      const auto saved = context->get_saved_variables();
      x = saved[0], weight = saved[1];
    } else {
      x = context->saved_data["x"].toTensor(), weight = context->saved_data["weight"].toTensor();
    }
    return {gradients[0].matmul(weight), gradients[0].t().matmul(x)};
  }
};

template <bool kAsVariables>
struct WithOwnLinear : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    return fc3(OwnLinear<kAsVariables>::apply(fc1(x).tanh(), fc2->weight) + fc2->bias);
  }
};

TEST_P(Layers, AFunctionThatSavesAWeight) {
  play(GetParam(), {.model = [] { return seeded_model<WithOwnLinear<true>>(33); }}, three_steps);
}

TEST_P(Layers, AFunctionThatKeepsAWeight) {
  play(GetParam(), {.model = [] { return seeded_model<WithOwnLinear<false>>(34); }}, three_steps);
}

// Weights that are used as their conjugates, whose gradients are then conjugates of what their memory has.
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

// A user's own operator that gives its weight a gradient of negatives of what its memory has, or of zeros without any.
template <bool kZeros>
struct LazyGradient : torch::autograd::Function<LazyGradient<kZeros>> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x, const at::Tensor&) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    const at::Tensor& gradient = gradients[0];
    if (kZeros) return {gradient, at::_efficientzerotensor({kFeatures, kFeatures}, gradient.options())};
    return {gradient, at::_neg_view(gradient.sum(0).expand({kFeatures, kFeatures}).clone())};
  }
};

template <bool kZeros>
struct WithLazyGradient : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    return fc3(LazyGradient<kZeros>::apply(fc1(x).tanh(), fc2->weight) + fc2->bias);
  }
};

TEST_P(Layers, AFunctionThatGivesAGradientOfNegatives) {
  play(GetParam(), {.model = [] { return seeded_model<WithLazyGradient<false>>(37); }}, three_steps);
}

TEST_P(Layers, AFunctionThatGivesAGradientOfZerosWithoutMemory) {
  play(GetParam(), {.model = [] { return seeded_model<WithLazyGradient<true>>(38); }}, three_steps);
}

// A hook on an activation that needs a weight, through a view of it taken in forward.
struct HookWithWeight : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    at::Tensor h = fc1(x).tanh();
    const at::Tensor seen = fc2->weight.detach().t();
    if (h.requires_grad()) h.register_hook([seen](const at::Tensor& gradient) { return gradient + 0.01 * seen.sum(); });
    return fc3(fc2(h).tanh());
  }
};

TEST_P(Layers, AHookThatUsesAWeight) {
  play(GetParam(), {.model = [] { return seeded_model<HookWithWeight>(35); }, .same_data = true}, three_steps);
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

// Sequences of several lengths.
struct Packed : Net {
  Packed() { register_module("lstm", lstm), register_module("out", out); }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor lengths = torch::arange(x.size(0)).remainder(3) + 2;
    const auto packed = torch::nn::utils::rnn::pack_padded_sequence(x.view({x.size(0), 4, 2}), lengths, true, false);
    return out(std::get<1>(std::get<1>(lstm->forward_with_packed_input(packed)))[0]);
  }
  torch::nn::LSTM lstm{torch::nn::LSTMOptions(2, 5).batch_first(true)};
  torch::nn::Linear out{5, kFeatures};
};

TEST_P(Layers, SequencesOfSeveralLengths) {
  play(GetParam(), {.model = [] { return seeded_model<Packed>(37); }, .same_data = true}, three_steps);
}

// ---- values and rates

TEST_P(Layers, ValuesClampedAfterEachStep) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      const torch::NoGradGuard no_grad;
      for (auto& parameter : run.parameters()) parameter.clamp_(-0.2, 0.2);
    }
  });
}

TEST_P(Layers, RatesBySchedulers) {
  play(GetParam(), {}, [](Trainer& run) {
    torch::optim::StepLR by_steps(run.optimizer(), /*step_size=*/1, /*gamma=*/0.5);
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      by_steps.step();
    }
  });
}

// A summary before training, as it is printed.
TEST_P(Layers, ParametersAreCountedAndPrinted) {
  play(GetParam(), {}, [](Trainer& run) {
    int64_t numel = 0;
    std::ostringstream text;
    for (const auto& entry : run.model->named_parameters()) {
      numel += entry.value().numel();
      text << entry.key() << " " << entry.value().sizes() << " " << entry.value().dtype() << "\n";
    }
    text << *run.model << "\n";
    run.note(torch::tensor(static_cast<double>(numel)));
    run.train(0);
    for (const auto& entry : run.model->named_parameters()) text << entry.value() << "\n";
    run.note(torch::tensor(static_cast<double>(text.str().size())));
    run.train(1);
  });
}

// ---- gradients cleared, and values written, by hand

void put_zeros(Trainer& run) {
  for (auto& parameter : run.model->parameters()) parameter.mutable_grad() = torch::zeros_like(parameter);
}

TEST_P(Layers, ZerosPutThereByHandBeforeEachForward) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      put_zeros(run);
      const at::Tensor loss = run.loss(step);
      run.note(loss);
      loss.backward();
      run.optimizer().step();
    }
  });
}

// Momenta go on.
TEST_P(Layers, AStepWithZerosPutThereByHand) {
  play(GetParam(), {}, [](Trainer& run) {
    run.train(0);
    put_zeros(run);
    run.optimizer().step();
    run.train(1);
    run.train(2);
  });
}

TEST_P(Layers, ZerosPutThereByHandAfterAFailedBackward) {
  play(GetParam(), {}, [](Trainer& run) {
    run.train(0);
    auto& net = mlp_of(*run.model);
    net.hook = [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("the user's hook"); };
    try {
      run.loss(1).backward();
    } catch (const std::exception&) {
      put_zeros(run);
    }
    net.hook = nullptr;
    run.train(2);
    run.train(3);
  });
}

TEST_P(Layers, LoadBetweenBackwardAndStep) {
  play(GetParam(), {}, [](Trainer& run) {
    std::stringstream saved;
    torch::save(mlp_of(*another_mlp()).parameters(), saved);
    run.train(0);
    run.optimizer().zero_grad();
    run.loss(1).backward();
    std::vector<at::Tensor> values;
    torch::load(values, saved);
    {
      const torch::NoGradGuard no_grad;
      size_t i = 0;
      for (auto& parameter : run.model->parameters()) parameter.set_data(values[i++].clone());
    }
    run.optimizer().step();
    run.train(2);
    run.train(3);
  });
}

// Values that every rank writes alike, where the ranks have gradients of their own.
TEST_P(Layers, SaliencyOfInputsThenOtherValues) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = run.x(step).requires_grad_();
      run.note(torch::autograd::grad({run(x).sum()}, {x})[0].square().sum(1).mean());
      const torch::NoGradGuard no_grad;
      for (auto& parameter : run.parameters()) parameter.data().mul_(0.9);
      const torch::AutoGradMode mode(true);
      run.train(step + 10);
    }
  });
}

TEST_P(Layers, GivenUpUnderNoSyncThenOtherValues) {
  play(GetParam(), {.expect = where_gradients_stay(GetParam()), .says = kDropped}, [](Trainer& run) {
    run.train(0);
    {
      auto scope = run.no_sync();
      run.loss(1).backward();
    }
    run.optimizer().zero_grad();
    for (auto& parameter : run.parameters()) parameter.data().mul_(0.9);
    run.train(2);
    {
      auto scope = run.no_sync();
      run.loss(3).backward();
    }
    const torch::NoGradGuard no_grad;
    for (auto& parameter : run.parameters()) parameter.mul_(0.9);
    const torch::AutoGradMode mode(true);
    const at::Tensor loss = run.loss(4);
    run.note(loss);
    loss.backward();
    run.optimizer().step();
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

Play mixture() {
  return {.model = [] { return seeded_model<MixtureOfExperts>(22); }, .unused = true};
}

TEST_P(Layers, ExpertsThatSomeRanksUse) { play(GetParam(), mixture(), three_steps); }

TEST_P(Layers, ExpertsThatSomeRanksUseInOneOfTwoBackwards) {
  play(GetParam(), mixture(), [](Trainer& run) {
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

// What a step or a norm must not take is known after new data, too.
TEST_P(Layers, OtherDataBetweenNoSyncAndClipping) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    {
      auto scope = run.no_sync();
      run.loss(0).backward();
    }
    auto parameters = run.model->parameters();
    torch::nn::utils::vector_to_parameters(0.9 * torch::nn::utils::parameters_to_vector(parameters), parameters);
    run.notes.push_back(run.clip_grad_norm_(0.05));
    run.optimizer().step();
  });
}

TEST_P(Layers, OtherDataBetweenNoSyncAndAStep) {
  for (const bool by_archive : {false, true})
    play(GetParam(), {.expect = Expect::kEither}, [=](Trainer& run) {
      run.train(0);
      run.optimizer().zero_grad();
      {
        auto scope = run.no_sync();
        run.loss(1).backward();
      }
      if (by_archive) {
        std::stringstream file;
        torch::save(seeded_model<Mlp>(24), file);
        torch::load(run.model, file, run.device);
      } else {
        for (at::Tensor& parameter : run.model->parameters()) parameter.set_data(0.9 * parameter.detach());
      }
      run.optimizer().step();
      run.train(2);
    });
}

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

TEST_P(Layers, LargeOnesInEveryOrder) {
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

TEST_P(Layers, LargeOnesAfterABackwardThatThrew) {
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

// Of so many large ones, which go as backward begins.
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

TEST_P(Layers, ManyLargeOnesWithAValidationBeforeBackwardAndValuesOfBefore) {
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

// By which a parameter that the pass did not seem to need gets a gradient after all.
TEST_P(Layers, AHookThatGoesBackwardThroughAnotherLoss) {
  Play play_of = mixture();
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

// Weights of a whole number of the rows that norms are taken by, and others.
struct Narrower : Net {
  Narrower() { register_module("narrow", narrow), register_module("wide", wide), register_module("last", last); }
  at::Tensor forward(const at::Tensor& x) override { return last(wide(narrow(x).tanh()).tanh()); }
  torch::nn::Linear narrow{torch::nn::LinearOptions(kFeatures, 6).bias(false)}, wide{6, kFeatures};
  torch::nn::Linear last{kFeatures, kFeatures};
};

TEST_P(Layers, ClippedByAnyNorm) {
  play(GetParam(), {.model = [] { return seeded_model<Narrower>(23); }}, [](Trainer& run) {
    for (const double norm_type : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
      run.loss(static_cast<int>(norm_type == 2.0)).backward();
      run.notes.push_back(run.clip_grad_norm_(0.05, norm_type));
      run.optimizer().step();
      run.optimizer().zero_grad();
    }
  });
}

// The optimizer's step throws, is caught, and training goes on.
TEST_P(Layers, AStepThatThrowsIsCaught) {
  play(GetParam(), {}, [](Trainer& run) {
    run.train(0);
    try {
      run.optimizer().step([]() -> at::Tensor { throw std::runtime_error("the user's closure"); });
    } catch (const std::runtime_error&) {
    }
    run.train(1);
    run.train(2);
  });
}

}  // namespace
}  // namespace tessera::loops
