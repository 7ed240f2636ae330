// What papers and forums tell people to do with a model, its outputs, values and gradients.
#include "tests/loops/loops.h"

namespace tessera::loops {
using namespace internal;
namespace {

TESSERA_LOOPS(Techniques, all_setups);

void step_with(Trainer& run, const at::Tensor& loss) {
  run.note(loss.detach());
  loss.backward();
  run.optimizer().step();
  run.optimizer().zero_grad();
}

TEST_P(Techniques, CalledUponItsOwnOutput) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      at::Tensor h = run.x(step);
      for (int i = 0; i < 3; ++i) h = run(h);
      step_with(run, torch::mse_loss(h, run.y(step)));
    }
  });
}

TEST_P(Techniques, OutputsChangedInPlace) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      at::Tensor out = run(run.x(step));
      out.mul_(2).add_(1).relu_();
      step_with(run, torch::mse_loss(out, run.y(step)));
    }
  });
}

struct Penal : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    kept = fc2->weight;
    return Mlp::forward(x);
  }
  at::Tensor kept;
};

TEST_P(Techniques, AWeightKeptByForwardAndUsedInTheLoss) {
  play(GetParam(), {.model = [] { return seeded_model<Penal>(31); }}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = torch::mse_loss(run(run.x(step)), run.y(step));
      step_with(run, loss + dynamic_cast<Penal&>(*run.model).kept.square().mean());
    }
  });
}

struct Identity : Net {
  Identity() { register_module("fc", fc); }
  at::Tensor forward(const at::Tensor& x) override { return skip ? x : fc(x); }
  torch::nn::Linear fc{kFeatures, kFeatures};
  bool skip = false;
};

TEST_P(Techniques, AForwardThatGivesItsInput) {
  play(GetParam(), {.model = [] { return seeded_model<Identity>(32); }, .unused = true}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      dynamic_cast<Identity&>(*run.model).skip = step == 1;
      const at::Tensor x = run.x(step).requires_grad_();
      step_with(run, torch::mse_loss(run(x), run.y(step)));
    }
  });
}

// Sharpness aware: up by the gradient, and back.
TEST_P(Techniques, StepsFromWhereTheLossIsWorse) {
  play(GetParam(), {.expect = GetParam().stage == 2 ? Expect::kEither : Expect::kEqual}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.loss(step).backward();
      const double norm = run.clip_grad_norm_(1e9);
      std::vector<at::Tensor> moves;
      {
        const torch::NoGradGuard no_grad;
        for (auto& parameter : run.parameters()) {
          moves.push_back(parameter.grad().defined() ? parameter.grad() * (0.05 / norm) : torch::Tensor());
          if (moves.back().defined()) parameter.add_(moves.back());
        }
      }
      run.optimizer().zero_grad();
      const at::Tensor loss = run.loss(step);
      loss.backward();
      run.note(loss.detach());
      {
        const torch::NoGradGuard no_grad;
        size_t i = 0;
        for (auto& parameter : run.parameters()) {
          if (moves[i].defined()) parameter.sub_(moves[i]);
          ++i;
        }
      }
      run.optimizer().step();
      run.optimizer().zero_grad();
    }
  });
}

TEST_P(Techniques, AModuleReplacedAfterWrapping) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    auto& net = mlp_of(*run.model);
    net.fc3 = net.replace_module("fc3", mlp_of(*another_mlp()).fc3);
    run.train(1);
    run.train(2);
  });
}

TEST_P(Techniques, AModuleTakenOutAfterWrapping) {
  play(GetParam(), {.expect = Expect::kEither, .unused = true}, [](Trainer& run) {
    run.train(0);
    auto& net = mlp_of(*run.model);
    net.unregister_module("fc2");
    net.skip_fc2 = true;
    run.train(1);
    run.train(2);
  });
}

TEST_P(Techniques, RowsOfNothing) {
  play(GetParam(), {}, [](Trainer& run) {
    run.train(0);
    const at::Tensor none = run.x(1).slice(0, 0, 0);
    run.optimizer().zero_grad();
    (run(none).sum() * 0).backward();
    run.optimizer().step();
    run.train(1);
  });
}

TEST_P(Techniques, BackwardOfSeveralRoots) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor first = run.loss(step), second = run.loss(step + 5);
      torch::autograd::backward({first, second});
      run.optimizer().step();
      run.optimizer().zero_grad();
      const at::Tensor out = run(run.x(step));
      out.backward(torch::full_like(out, 1. / static_cast<double>(out.numel())));
      run.optimizer().step();
    }
  });
}

struct SharedTwice : Net {
  SharedTwice() { register_module("first", fc), register_module("second", fc), register_module("out", out); }
  at::Tensor forward(const at::Tensor& x) override { return out(fc(fc(x).tanh()).tanh()); }
  torch::nn::Linear fc{kFeatures, kFeatures}, out{kFeatures, kFeatures};
};

TEST_P(Techniques, OneModuleUnderTwoNames) {
  play(GetParam(), {.model = [] { return seeded_model<SharedTwice>(33); }}, three_steps);
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

TEST_P(Techniques, ModulesInADictionary) {
  play(GetParam(), {.model = [] { return seeded_model<Dictionary>(34); }}, three_steps);
}

struct Normed : Net {
  Normed() {
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

TEST_P(Techniques, WeightNorm) {
  play(GetParam(), {.model = [] { return seeded_model<Normed>(35); }}, three_steps);
}

// A hand-written gradient surgery: two losses' gradients, kept, put together.
TEST_P(Techniques, GradientsOfTwoLossesPutTogether) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      std::vector<at::Tensor> first;
      run.loss(step).backward();
      for (auto& parameter : run.parameters())
        first.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
      run.optimizer().zero_grad();
      run.loss(step + 3).backward();
      size_t i = 0;
      for (auto& parameter : run.parameters()) {
        if (parameter.grad().defined()) parameter.mutable_grad() = parameter.grad() * 0.3 + first[i] * 0.7;
        ++i;
      }
      run.optimizer().step();
      run.optimizer().zero_grad();
    }
  });
}

TEST_P(Techniques, TheOptimizersStateIsClearedHalfWay) {
  play(GetParam(), {}, [](Trainer& run) {
    run.train(0);
    run.optimizer().state().clear();
    run.train(1);
    run.optimizer().param_groups()[0].options().set_lr(0.02);
    run.train(2);
  });
}

TEST_P(Techniques, TheModelAfterItsWrapperHasGone) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    const Model model = another_mlp();
    {
      auto other = run.another(model);
      other->train(0);
    }
    const torch::NoGradGuard no_grad;
    run.note(torch::mse_loss(model->forward(run.x(1)), run.y(1)));
    run.note(model->parameters()[0].square().sum());
  });
}

TEST_P(Techniques, ABackwardThroughTwoForwardsOneUnderNoGrad) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor out = run(run.x(step));
      at::Tensor target;
      {
        const torch::NoGradGuard no_grad;
        target = run(run.y(step));
      }
      step_with(run, torch::mse_loss(out, target + run.y(step)));
    }
  });
}

TEST_P(Techniques, AnEvaluationModeStep) {
  play(GetParam(), {}, [](Trainer& run) {
    run.model->eval();
    run.train(0);
    run.model->train();
    run.train(1);
  });
}

TEST_P(Techniques, TheLossIsScaledAndUnscaledByHand) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      (run.loss(step) * 1024).backward();
      for (auto& group : run.optimizer().param_groups())
        for (auto& parameter : group.params())
          if (parameter.grad().defined()) parameter.grad().div_(1024);
      run.optimizer().step();
    }
  });
}

TEST_P(Techniques, GradientsDefinedAsZerosByHandOnTheWrappersParameters) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      for (auto& parameter : run.parameters()) parameter.mutable_grad() = torch::zeros_like(parameter);
      run.loss(step).backward();
      run.optimizer().step();
    }
  });
}

TEST_P(Techniques, AverageOfGradientsOverStepsByHand) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 2; ++step) {
      run.optimizer().zero_grad();
      for (int part = 0; part < 3; ++part) run.loss(3 * step + part).backward();
      for (auto& parameter : run.parameters())
        if (parameter.grad().defined()) parameter.mutable_grad() /= 3;
      run.optimizer().step();
    }
  });
}

TEST_P(Techniques, ValuesSwappedForTheAverageAndBack) {
  play(GetParam(), {}, [](Trainer& run) {
    std::vector<at::Tensor> average;
    for (auto& parameter : run.parameters()) average.push_back(parameter.detach().clone());
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      size_t i = 0;
      for (auto& parameter : run.parameters()) average[i++].lerp_(parameter.detach(), 0.1);
      std::vector<at::Tensor> kept;
      i = 0;
      for (auto& parameter : run.parameters()) {
        kept.push_back(parameter.detach().clone());
        parameter.data().copy_(average[i++]);
      }
      {
        const torch::NoGradGuard no_grad;
        run.note(run.loss(step + 9));
      }
      i = 0;
      for (auto& parameter : run.parameters()) parameter.data().copy_(kept[i++]);
    }
  });
}

}  // namespace
}  // namespace tessera::loops
