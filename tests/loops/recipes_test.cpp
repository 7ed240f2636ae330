// Recipes: what tutorials of training show, a loop each. Of layers, optimizers, backward passes and values of its own.
#include <ATen/CPUGeneratorImpl.h>

#include <sstream>
#include <utility>
#include <vector>

#include "tests/loops/loops.h"

namespace tessera::loops::recipes_test {
namespace {

TESSERA_LOOPS(Recipes, all_setups);

bool is_sharded(const Setup& setup) { return setup.stage == 3; }
void step_with(Trainer& run, const at::Tensor& loss) {
  run.note(loss.detach());
  loss.backward();
  run.optimizer().step();
  run.optimizer().zero_grad();
}

// ---- optimizers

TEST_P(Recipes, TheRateFollowsTheLoss) {
  play(GetParam(), {.same_data = true}, [](Trainer& run) {
    torch::optim::ReduceLROnPlateauScheduler scheduler(
        run.optimizer(), torch::optim::ReduceLROnPlateauScheduler::SchedulerMode::min, 0.5, 0);
    for (int step = 0; step < 5; ++step) {
      const at::Tensor loss = run.loss(step);
      scheduler.step(loss.item<float>());
      step_with(run, loss);
    }
  });
}

// Back half of the way, until the loss is less, along the gradient.
TEST_P(Recipes, ALineSearchByHand) {
  if (GetParam().stage == 2) GTEST_SKIP() << kOwnersAlone;
  play(GetParam(), {.same_data = true}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.zero_grad();
      const at::Tensor loss = run.loss(step);
      loss.backward();
      const torch::NoGradGuard no_grad;
      double moved = 0;
      for (double rate = 8; rate > 1e-3; rate /= 2) {
        for (auto& parameter : run.parameters())
          if (parameter.grad().defined()) parameter.add_(parameter.grad(), moved - rate);
        moved = rate;
        if (run.loss(step).item<double>() < loss.item<double>()) break;
      }
      run.note(loss);
    }
  });
}

TEST_P(Recipes, AClosureThatIsCalledSeveralTimes) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      auto closure = [&] {
        run.optimizer().zero_grad();
        at::Tensor loss = run.loss(step);
        loss.backward();
        return loss;
      };
      closure();
      run.note(closure());
      run.note(run.optimizer().step(closure));
    }
  });
}

TEST_P(Recipes, GradientsWithNoise) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      for (auto& parameter : run.parameters())
        if (parameter.grad().defined()) parameter.grad().add_((parameter.detach() * 100).sin() * 0.01);
      run.optimizer().step();
    }
  });
}

TEST_P(Recipes, GradientsReplacedByTheirSigns) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      for (auto& parameter : run.parameters())
        if (parameter.grad().defined()) parameter.mutable_grad() = parameter.grad().sign();
      run.optimizer().step();
    }
  });
}

TEST_P(Recipes, BiasesWithoutDecay) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    auto& group = run.optimizer().param_groups()[0];
    std::vector<at::Tensor> some, others;
    for (size_t i = 0; i < group.params().size(); ++i) (i % 2 == 0 ? some : others).push_back(group.params()[i]);
    auto options = group.options().clone();
    options->set_lr(0.03);
    group.params() = some;
    run.optimizer().add_param_group({others, std::move(options)});
    three_steps(run);
  });
}

TEST_P(Recipes, MomentumIsForgottenThroughTheState) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      run.train(step);
      if (step != 1) continue;
      for (auto& [parameter, state] : run.optimizer().state()) {
        if (auto* adam = dynamic_cast<torch::optim::AdamParamState*>(state.get())) adam->exp_avg().zero_();
        if (auto* sgd = dynamic_cast<torch::optim::SGDParamState*>(state.get()))
          if (sgd->momentum_buffer().defined()) sgd->momentum_buffer().zero_();
      }
    }
  });
}

TEST_P(Recipes, AStepIsLeftOutByAll) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 5; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      if (step % 2 == 0) run.optimizer().step();
    }
  });
}

TEST_P(Recipes, LossesThatAreNoNumbersAreLeftOut) {
  const bool checks = GetParam().name == "fsdp_ahead";  // check_finite
  play(GetParam(),
       {.expect = checks ? Expect::kRefused : Expect::kEqual, .says = {"reduced gradients are infinite or NaN"}},
       [](Trainer& run) {
         for (int step = 0; step < 4; ++step) {
           run.optimizer().zero_grad();
           const at::Tensor loss = run.loss(step) * (step == 1 ? std::nan("") : 1);
           loss.backward();
           if (!std::isnan(loss.item<double>())) run.optimizer().step();
         }
       });
}

std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>> halves(const std::vector<at::Tensor>& all) {
  const auto middle = all.begin() + static_cast<int64_t>(all.size() / 2);
  return {{all.begin(), middle}, {middle, all.end()}};
}

TEST_P(Recipes, TwoOptimizersForTwoHalves) {
  if (GetParam().stage == 2) GTEST_SKIP() << kOwnersAlone;
  play(GetParam(), {}, [](Trainer& run) {
    const auto [front, back] = halves(run.parameters());
    torch::optim::SGD first(front, torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::RMSprop second(back, 0.01);
    for (int step = 0; step < 4; ++step) {
      run.zero_grad();
      run.loss(step).backward();
      first.step();
      if (step % 2 == 1) second.step();
    }
  });
}

// ---- batches

TEST_P(Recipes, BatchesOfOtherSizes) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      std::vector<at::Tensor> x, y;
      for (int part = 0; part <= step % 3; ++part) x.push_back(run.x(step + part)), y.push_back(run.y(step + part));
      step_with(run, torch::mse_loss(run(torch::cat(x)), torch::cat(y)));
    }
  });
}

struct Wide : Net {
  Wide() { register_module("first", first), register_module("last", last); }
  at::Tensor forward(const at::Tensor& x) override { return last(first(x).tanh()); }
  torch::nn::Linear first{kFeatures, 64}, last{64, kFeatures};
};

// Blocks of hundreds of kilobytes, other ones in each step and in what lies between: a validation, and a forward whose
// loss nobody wants any more.
TEST_P(Recipes, LargeBatchesOfOtherSizes) {
  play(GetParam(), {.model = [] { return seeded_model<Wide>(71); }, .rounding = 10}, [](Trainer& run) {
    const auto large = [](const at::Tensor& rows, int64_t times) { return rows.repeat({times, 1}); };
    int step = 0;
    for (const int64_t times : {200, 700, 300, 800, 100, 600}) {
      step_with(run, torch::mse_loss(run(large(run.x(step), times)), large(run.y(step), times)));
      try {
        const at::Tensor loss = run(large(run.x(step + 1), times / 2)).sum();
        throw std::runtime_error("the data were no good");
      } catch (const std::runtime_error&) {
        torch::NoGradGuard no_grad;
        run.note(torch::mse_loss(run(large(run.x(step + 2), 900 - times)), large(run.y(step + 2), 900 - times)));
      }
      ++step;
    }
  });
}

TEST_P(Recipes, OtherNumbersOfMicroBatches) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      const int parts = 1 + step % 3;
      for (int part = 0; part < parts; ++part) {
        std::unique_ptr<ScopeExit> outer, inner;
        if (part + 1 < parts) outer = std::make_unique<ScopeExit>(run.no_sync());
        if (part == 0 && outer) inner = std::make_unique<ScopeExit>(run.no_sync());
        (run.loss(step + part) / parts).backward();
        inner.reset();
      }
      run.optimizer().step();
      run.optimizer().zero_grad();
    }
  });
}

TEST_P(Recipes, AFullStateBetweenMicroBatches) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      {
        const ScopeExit scope = run.no_sync();
        run.loss(step).backward();
      }
      run.note_state(run);
      run.loss(step + 1).backward();
      run.note_state(run);
      run.optimizer().step();
      run.optimizer().zero_grad();
    }
  });
}

TEST_P(Recipes, InputsMovedAgainstTheModel) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = run.x(step).requires_grad_();
      torch::mse_loss(run(x), run.y(step)).backward();
      const at::Tensor moved = (x + 0.1 * x.grad().sign()).detach();
      run.optimizer().zero_grad();
      step_with(run, torch::mse_loss(run(moved), run.y(step)));
    }
  });
}

// ---- backward

TEST_P(Recipes, BackwardOfNoScalar) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor out = run(run.x(step));
      out.backward(2 * (out.detach() - run.y(step)) / static_cast<double>(out.numel()));
      run.optimizer().step();
    }
  });
}

// Of two stages that meet at a leaf, as pipelines do it.
struct TwoStages : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    first = fc1(x).tanh();
    second = first.detach().requires_grad_();
    return fc3(fc2(second).tanh());
  }
  at::Tensor first, second;
};

TEST_P(Recipes, ABackwardInTwoStages) {
  play(GetParam(), {.expect = Expect::kEither, .model = [] { return seeded_model<TwoStages>(41); }, .unused = true},
       [](Trainer& run) {
         for (int step = 0; step < 3; ++step) {
           run.optimizer().zero_grad();
           auto& net = dynamic_cast<TwoStages&>(*run.model);
           const at::Tensor loss = run.loss(step);
           run.note(loss.detach());
           loss.backward();
           net.first.backward(net.second.grad());
           run.optimizer().step();
         }
       });
}

// Memory is saved by computing a part again, as papers describe it.
struct ComputedAgain : torch::autograd::Function<ComputedAgain> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            torch::nn::LinearImpl* layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<int64_t>(layer);
    const at::AutoGradMode off(false);
    return layer->forward(x).tanh();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    auto* layer = reinterpret_cast<torch::nn::LinearImpl*>(context->saved_data["layer"].toInt());
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    const at::AutoGradMode on(true);
    layer->forward(x).tanh().backward(gradients[0]);
    return {x.grad(), at::Tensor()};
  }
};
struct LessMemory : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor h = fc1(x).tanh();
    return fc3(h.requires_grad() ? ComputedAgain::apply(h, fc2.get()) : fc2(h).tanh());
  }
};

TEST_P(Recipes, APartComputedAgainByHand) {
  play(GetParam(), {.model = [] { return seeded_model<LessMemory>(42); }}, three_steps);
}

struct Reversed : torch::autograd::Function<Reversed> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.view_as(x); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {-0.1 * gradients[0]};
  }
};
struct WithReversal : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor h = fc1(x).tanh();
    return fc2(h) + fc3(Reversed::apply(h));
  }
};

TEST_P(Recipes, AGradientThatIsReversed) {
  play(GetParam(), {.model = [] { return seeded_model<WithReversal>(43); }}, three_steps);
}

struct Looking : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    at::Tensor h = fc1(x).tanh();
    if (h.requires_grad()) {
      const unsigned position = h.register_hook([this](const at::Tensor& gradient) {
        ++seen;
        return gradient * 0.5;
      });
      if (seen == 1) h.remove_hook(position);
      h.retain_grad();
      kept = h;
    }
    return fc3(fc2(h).tanh());
  }
  int seen = 0;
  at::Tensor kept;
};

TEST_P(Recipes, HooksThatAreTakenAwayAndGradientsThatAreKept) {
  play(GetParam(), {.model = [] { return seeded_model<Looking>(44); }}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      run.note(dynamic_cast<Looking&>(*run.model).kept.grad().sum());
    }
  });
}

TEST_P(Recipes, AHookOnAParameterIsTakenAway) {
  play(GetParam(), {.expect = is_sharded(GetParam()) ? Expect::kEither : Expect::kEqual}, [](Trainer& run) {
    const at::Tensor weight = mlp_of(*run.model).fc2->weight;
    const unsigned position = weight.register_hook([](const at::Tensor& gradient) { return gradient * 0.5; });
    run.train(0);
    weight.remove_hook(position);
    for (int step = 1; step < 3; ++step) run.train(step);
  });
}

TEST_P(Recipes, ASecondBackwardIsRefusedAndCaught) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = run.loss(step);
      loss.backward();
      if (step == 1) {
        bool thrown = false;
        try {
          loss.backward();
        } catch (const std::exception&) {
          thrown = true;
        }
        if (!thrown) throw std::runtime_error("the graph is there a second time");
        run.optimizer().zero_grad();
        run.loss(step).backward();
      }
      run.optimizer().step();
      run.optimizer().zero_grad();
    }
  });
}

// The outer loss is that of weights after a step of an inner one.
struct Inner : Net {
  Inner() { weight = register_parameter("weight", torch::randn({kFeatures, kFeatures})), register_module("fc", fc); }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor inner = fc(x.matmul(weight)).square().mean();
    const at::Tensor slope = torch::autograd::grad({inner}, {weight}, {}, true, /*create_graph=*/true)[0];
    return fc(x.matmul(weight - 0.5 * slope).tanh());
  }
  torch::nn::Linear fc{kFeatures, kFeatures};
  at::Tensor weight;
};

TEST_P(Recipes, AnInnerStepThatIsDifferentiated) {
  play(GetParam(), {.model = [] { return seeded_model<Inner>(45); }, .same_data = true}, three_steps);
}

TEST_P(Recipes, LayersCalledPastForward) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    auto& net = mlp_of(*run.model);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor out = net.fc3(net.fc2(net.fc1(run.x(step)).tanh()).tanh());
      step_with(run, torch::mse_loss(out, run.y(step)));
    }
  });
}

// ---- models

struct Dropping : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor h = fc1(x).tanh();
    if (!is_training()) return fc3(fc2(h));
    auto generator = at::make_generator<at::CPUGeneratorImpl>(calls++);
    return fc3(fc2(h * torch::empty_like(h).bernoulli_(0.5, generator) * 2));
  }
  uint64_t calls = 7;
};

TEST_P(Recipes, DropoutFromAGeneratorOfItsOwn) {
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

TEST_P(Recipes, BuffersThatForwardChanges) {
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

TEST_P(Recipes, SpectralNorm) {
  play(GetParam(), {.model = [] { return seeded_model<Spectral>(48); }}, three_steps);
}

struct LowRank : Mlp {
  LowRank() {
    for (auto& parameter : fc2->parameters()) parameter.requires_grad_(false);
    down = register_parameter("down", torch::randn({kFeatures, 2}) * 0.1);
    up = register_parameter("up", torch::zeros({2, kFeatures}));
  }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor h = fc1(x).tanh();
    return fc3(fc2(h) + h.matmul(down).matmul(up));
  }
  at::Tensor down, up;
};

TEST_P(Recipes, AdaptersBesideFrozenWeights) {
  play(GetParam(), {.model = [] { return seeded_model<LowRank>(49); }}, three_steps);
}

// One number, and nothing at all.
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

TEST_P(Recipes, ATemperatureAndAnEmptyParameter) {
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

TEST_P(Recipes, BilinearLayersAndTransformers) {
  play(GetParam(), {.model = [] { return seeded_model<Others>(51); }}, three_steps);
}

// In another order of memory than the usual.
struct ChannelsLast : Net {
  ChannelsLast() { register_module("convolution", convolution), register_module("fc", fc); }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor image = x.view({x.size(0), 2, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast);
    return fc(convolution(image).tanh().flatten(1));
  }
  torch::nn::Conv2d convolution{torch::nn::Conv2dOptions(2, 4, 2)};
  torch::nn::Linear fc{4, kFeatures};
};

TEST_P(Recipes, WeightsInChannelsLast) {
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

TEST_P(Recipes, WeightsThatAreViews) {
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

// One number behind many: torch's optimizers refuse to write to it.
TEST_P(Recipes, AnExpandedWeight) {
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

// One weight is the other's, turned; or begins in its middle.
TEST_P(Recipes, AWeightThatIsAnotherTurned) {
  auto model = [] {
    Model net = mlp();
    mlp_of(*net).fc3->weight.set_data(mlp_of(*net).fc1->weight.detach().t());
    return net;
  };
  play(GetParam(), {.expect = Expect::kEither, .model = model}, three_steps);
}

TEST_P(Recipes, WeightsThatOverlapInPart) {
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

// The layer's member, and not what is registered: that is used no more.
TEST_P(Recipes, WeightsTiedByAssignmentBeforeWrapping) {
  auto model = [] {
    Model net = mlp();
    mlp_of(*net).fc3->weight = mlp_of(*net).fc1->weight;
    return net;
  };
  play(GetParam(), {.model = model, .unused = true}, three_steps);
}

TEST_P(Recipes, WeightsTiedByAssignmentAfterWrapping) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    run.train(0);
    mlp_of(*run.model).fc3->weight = mlp_of(*run.model).fc1->weight;
    for (int step = 1; step < 4; ++step) run.train(step);
  });
}

// A learning rate of one bit: torch's SGD rounds its product with a gradient of bfloat16 in what is left over of a
// vector, but not in vectors, which lie elsewhere in shards. With one bit there is nothing to round.
TEST_P(Recipes, HalfTheModelInBfloat16) {
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

// ---- values and wrappers

TEST_P(Recipes, AnAverageKeptInAList) {
  play(GetParam(), {}, [](Trainer& run) {
    std::vector<at::Tensor> average;
    for (const auto& parameter : run.parameters()) average.push_back(parameter.detach().clone());
    for (int step = 0; step < 4; ++step) {
      run.train(step);
      const torch::NoGradGuard no_grad;
      const auto parameters = run.parameters();
      for (size_t i = 0; i < average.size(); ++i) average[i].lerp_(parameters[i], 0.2);
    }
    const torch::NoGradGuard no_grad;
    auto parameters = run.parameters();
    for (size_t i = 0; i < average.size(); ++i) parameters[i].copy_(average[i]);
  });
}

TEST_P(Recipes, ASecondWrapperAroundTheSameModule) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    const auto second = run.another(run.model);
    for (int step = 1; step < 4; ++step) run.train(step);
  });
}

TEST_P(Recipes, FrozenThroughTheWrapperBetweenForwardAndBackward) {
  play(GetParam(), {.expect = Expect::kEither, .unused = true}, [](Trainer& run) {
    at::Tensor weight = run.parameters()[2];
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor loss = run.loss(step);
      weight.requires_grad_(false);
      loss.backward();
      weight.requires_grad_(true);
      run.optimizer().step();
    }
  });
}

TEST_P(Recipes, FrozenThroughTheWrapperBetweenBackwardAndStep) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    at::Tensor weight = run.parameters()[2];
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      weight.requires_grad_(false);
      run.optimizer().step();
      weight.requires_grad_(true);
    }
  });
}

struct Checkpointed : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    at::Tensor h = fc1(x).tanh();
    const at::Tensor out = checkpointed(fc2, h);
    if (changes && h.requires_grad()) h.add_(1);
    return fc3(out.tanh() + h);
  }
  bool changes = false;
};

TEST_P(Recipes, ACheckpointedInputChangedInPlace) {
  play(GetParam(), {.expect = Expect::kThrows, .model = [] { return seeded_model<Checkpointed>(57); }},
       [](Trainer& run) {
         run.train(0);
         dynamic_cast<Checkpointed&>(*run.model).changes = true;
         run.train(1);
       });
}

TEST_P(Recipes, ACheckpointedInputChangedInPlaceAndCaught) {
  play(GetParam(), {.model = [] { return seeded_model<Checkpointed>(58); }}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      run.optimizer().zero_grad();
      dynamic_cast<Checkpointed&>(*run.model).changes = step == 1;
      try {
        run.loss(step).backward();
      } catch (const std::exception&) {
        continue;
      }
      run.optimizer().step();
    }
  });
}

// ---- sums over unequal parts

// In every other step each rank but the last takes the first row of the next one's.
at::Tensor rows_of(const Trainer& run, const at::Tensor& all, int step) {
  const int64_t least = kRows / run.world, more = step % 2 == 0 ? 1 : 0;
  const int64_t begin = least * run.rank + (run.rank > 0 ? more : 0);
  const int64_t end = least * (run.rank + 1) + (run.rank + 1 < run.world ? more : 0);
  return all.slice(0, begin, end);
}

TEST_P(Recipes, ADivisorOfTheirOwnForEachStep) {
  for (bool summed : {false, true}) {
    play(GetParam(), {.same_data = true}, [summed](Trainer& run) {
      for (int step = 0; step < 4; ++step) {
        const at::Tensor x = rows_of(run, run.x(step), step), y = rows_of(run, run.y(step), step);
        if (summed)
          run.divide_gradients_by_sum(x.size(0) * (1 + step));
        else
          run.set_gradient_divide_factor(kRows * (1 + step));
        run.optimizer().zero_grad();
        (run(x) - y).square().sum().backward();
        run.optimizer().step();
      }
    });
  }
}

}  // namespace
}  // namespace tessera::loops::recipes_test
