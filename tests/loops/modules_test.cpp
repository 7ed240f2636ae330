// Modules that are not a chain of layers: frozen, hooked, complex, normalised, with operators of their own.
#include <torch/library.h>

#include <future>
#include <optional>

#include "tests/loops/loops.h"

namespace tessera::loops {
using namespace internal;
namespace {

TESSERA_LOOPS(Modules, all_setups);

// ---- requires_grad

TEST_P(Modules, FrozenThroughTheModuleBetweenSteps) {
  play(GetParam(), {.expect = Expect::kEither, .unused = true}, [](Trainer& run) {
    for (int step = 0; step < 6; ++step) {
      mlp_of(*run.model).fc2->weight.requires_grad_(step % 3 == 0);
      run.train(step);
    }
  });
}

TEST_P(Modules, FrozenThroughTheWrapperBetweenSteps) {
  play(GetParam(), {.expect = Expect::kEither, .unused = true}, [](Trainer& run) {
    for (int step = 0; step < 6; ++step) {
      run.parameters()[2].requires_grad_(step % 3 == 0);
      run.train(step);
    }
  });
}

TEST_P(Modules, FrozenBetweenForwardAndBackward) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    at::Tensor weight = mlp_of(*run.model).fc2->weight;
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      at::Tensor loss = run.loss(step);
      weight.requires_grad_(false);
      loss.backward();
      weight.requires_grad_(true);
      run.optimizer().step();
    }
  });
}

// The gradient is there already, and the optimizer asks for nothing else.
TEST_P(Modules, FrozenBetweenBackwardAndStep) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    at::Tensor weight = mlp_of(*run.model).fc2->weight;
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      weight.requires_grad_(false);
      run.optimizer().step();
      weight.requires_grad_(true);
    }
  });
}

TEST_P(Modules, FrozenFromTheBeginning) {
  auto frozen = [] {
    Model model = mlp();
    for (auto& parameter : mlp_of(*model).fc1->parameters()) parameter.requires_grad_(false);
    return model;
  };
  play(GetParam(), {.model = frozen}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

// A schedule of freezing that the model keeps itself. In shards, one of a unit that is in use already is refused.
TEST_P(Modules, UnfrozenInsideForward) {
  auto frozen = [] {
    Model model = mlp();
    for (auto& parameter : mlp_of(*model).fc2->parameters()) parameter.requires_grad_(false);
    return model;
  };
  play(GetParam(),
       {.expect = GetParam().stage == 3 ? Expect::kEither : Expect::kEqual, .model = frozen, .unused = true},
       [](Trainer& run) {
         Mlp& net = mlp_of(*run.model);
         for (int step = 0; step < 4; ++step) {
           net.in_forward = [&net, step] {
             for (auto& parameter : net.fc2->parameters()) parameter.requires_grad_(step > 1);
           };
           run.train(step);
         }
         net.in_forward = nullptr;
       });
}

TEST_P(Modules, FrozenInsideForward) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    Mlp& net = mlp_of(*run.model);
    for (int step = 0; step < 6; ++step) {
      net.in_forward = [&net, step] {
        for (auto& parameter : net.fc2->parameters()) parameter.requires_grad_(step % 3 == 0);
      };
      run.train(step);
    }
    net.in_forward = nullptr;
  });
}

TEST_P(Modules, ValuesReplacedInsideForward) {
  play(GetParam(), {.expect = GetParam().stage == 3 ? Expect::kEither : Expect::kEqual}, [](Trainer& run) {
    Mlp& net = mlp_of(*run.model);
    const at::Tensor fresh = mlp_of(*another_mlp()).fc2->weight.detach();
    for (int step = 0; step < 3; ++step) {
      if (step == 1) net.in_forward = [&] { net.fc2->weight.set_data(fresh.clone()); };
      run.train(step);
      net.in_forward = nullptr;
    }
  });
}

// What a forward that was given up had found is not what the next one finds.
TEST_P(Modules, FrozenAfterAForwardThatThrew) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    Mlp& net = mlp_of(*run.model);
    for (int step = 0; step < 4; ++step) {
      net.in_forward = [] { throw std::runtime_error("the user's exception"); };
      EXPECT_THROW(run.loss(step), std::runtime_error);
      net.in_forward = nullptr;
      net.fc2->weight.requires_grad_(step % 2 == 0);
      run.train(step);
    }
  });
}

// ---- hooks

TEST_P(Modules, HookOnAModuleParameter) {
  play(GetParam(), {}, [](Trainer& run) {
    mlp_of(*run.model).fc2->weight.register_hook([](const at::Tensor& gradient) { return 2 * gradient; });
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

TEST_P(Modules, HookOnAModuleParameterBeforeWrapping) {
  auto hooked = [] {
    Model model = mlp();
    mlp_of(*model).fc2->weight.register_hook([](const at::Tensor& gradient) { return 2 * gradient; });
    return model;
  };
  play(GetParam(), {.expect = Expect::kEither, .model = hooked}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

// A shard is no part of the graph, so its hook would never be called.
TEST_P(Modules, HookOnAWrappersParameter) {
  play(GetParam(),
       {.expect = GetParam().stage == 3 ? Expect::kRefused : Expect::kEqual, .says = {"a hook on its shard"}},
       [](Trainer& run) {
         run.train(0);
         run.parameters()[2].register_hook([](const at::Tensor& gradient) { return 2 * gradient; });
         for (int step = 1; step < 3; ++step) run.train(step);
       });
}

// ---- layers and parameters of other kinds

// Its parameters belong to no wrapper, so nobody would average their gradients.
TEST_P(Modules, LayerRegisteredAfterWrapping) {
  play(
      GetParam(),
      {.expect = Expect::kRefused, .says = {"parameter 'extra.weight' was registered after the module was wrapped by"}},
      [](Trainer& run) {
        run.train(0);
        Mlp& net = mlp_of(*run.model);
        net.extra = seeded(9, [] { return torch::nn::Linear(kFeatures, kFeatures); });
        net.extra->to(at::kDouble);
        net.register_module("extra", net.extra);
        run.train(1);
      });
}

// In single precision, and compared so.
struct Complex : Net {
  Complex() { register_module("layer", layer); }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor h = layer(x.to(at::kFloat)).to(at::kComplexFloat).matmul(weight);
    return (torch::view_as_real(h).sum(-1) + h.abs()).to(at::kDouble);
  }
  torch::nn::Linear layer{kFeatures, kFeatures};
  at::Tensor weight = register_parameter("weight", torch::randn({kFeatures, kFeatures}, at::kComplexFloat));
};

TEST_P(Modules, ComplexWeight) {
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

// Forward itself changes the weight, in the rows that it is asked for.
TEST_P(Modules, EmbeddingWithMaxNorm) {
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

// The second forward's buffers must not be written into what the first one's backward still needs.
TEST_P(Modules, BatchNormWithTwoForwardsBeforeOneBackward) {
  play(GetParam(), {.model = normed, .same_data = true}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      (run.loss(2 * step) + run.loss(2 * step + 1)).backward();
      run.optimizer().step();
    }
  });
}

TEST_P(Modules, BatchNormTrainedEvaluatedAndTrained) {
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

// ---- operators

// What the operator below uses besides its arguments: "another unit's" parameter.
thread_local const at::Tensor* hidden_weight = nullptr;

at::Tensor linear_and_hidden(const at::Tensor& x, const at::Tensor& weight) {
  return x.matmul(weight).matmul(*hidden_weight);
}

TORCH_LIBRARY(tessera_loops, library) {
  library.def("linear_and_hidden(Tensor x, Tensor weight) -> Tensor", &linear_and_hidden);
}

struct WithOperator : Net {
  WithOperator() {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) override {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("tessera_loops::linear_and_hidden", "")
                               .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
    hidden_weight = &fc2->weight;
    return op.call(x, fc1->weight) + fc1->bias + fc2->bias;
  }
  torch::nn::Linear fc1{kFeatures, kFeatures}, fc2{kFeatures, kFeatures};
};

// The kernel is called below the key that pages parameters in.
TEST_P(Modules, AnOperatorWhoseKernelUsesAnotherUnitsParameter) {
  auto model = [] { return seeded(7, []() -> Model { return std::make_shared<WithOperator>(); }); };
  play(GetParam(), {.model = model}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

// y = x w, whose backward multiplies on a thread of its own, as a user's pool of threads does.
struct Threaded : torch::autograd::Function<Threaded> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return x.matmul(weight);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto saved = context->get_saved_variables();
    auto of_x = std::async(std::launch::async, [&] {
      torch::NoGradGuard no_grad;
      return gradients[0].matmul(saved[1].t());
    });
    return {of_x.get(), saved[0].t().matmul(gradients[0])};
  }
};

struct WithThreads : Net {
  WithThreads() {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) override { return Threaded::apply(fc1(x).tanh(), fc2->weight) + fc2->bias; }
  torch::nn::Linear fc1{kFeatures, kFeatures}, fc2{kFeatures, kFeatures};
};

TEST_P(Modules, AnAutogradFunctionWithAThread) {
  auto model = [] { return seeded(8, []() -> Model { return std::make_shared<WithThreads>(); }); };
  play(GetParam(), {.expect = Expect::kEither, .model = model}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

// The weight that it saves is used once more, recorded. Nobody goes through the wrapper.
struct WithFunctionFirst : WithThreads {
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor h = Threaded::apply(x, fc2->weight);
    return h + fc2->bias + fc1(x).tanh().matmul(fc2->weight);
  }
};

TEST_P(Modules, AnAutogradFunctionSavesAWeightPastTheWrapper) {
  auto model = [] { return seeded(8, []() -> Model { return std::make_shared<WithFunctionFirst>(); }); };
  play(GetParam(), {.model = model}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor loss = torch::mse_loss(run.model->forward(run.x(step)), run.y(step));
      run.note(loss.detach());
      loss.backward();
      run.optimizer().step();
    }
  });
}

// ---- checkpointed()

// Autograd itself throws where a saved tensor was changed; what is computed again must not hide it.
TEST(Checkpointed, InputChangedAfterTheCall) {
  for (bool with_offload : {false, true}) {
    for (bool checkpoint : {false, true}) {
      if (with_offload && !checkpoint) continue;
      auto layer = seeded(1, [] { return torch::nn::Linear(kFeatures, kFeatures); });
      ActivationOffload offload(at::kCPU, {.min_bytes = 0});
      const at::Tensor x = torch::ones({4, kFeatures}).requires_grad_();
      at::Tensor h = x * 2, y;
      {
        std::optional<ActivationOffload::Scope> use;
        if (with_offload) use.emplace(offload);
        y = checkpoint ? checkpointed(layer, h) : layer->forward(h);
      }
      h.mul_(3);
      EXPECT_NE(error_of<std::exception>([&] { y.square().sum().backward(); }), "")
          << (checkpoint ? "checkpointed" : "plain") << (with_offload ? " with offload" : "");
    }
  }
}

}  // namespace
}  // namespace tessera::loops
