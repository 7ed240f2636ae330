// Values of parameters that the program writes or looks at.
#include "tests/loops/loops.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <algorithm>
#include <limits>
#include <map>
#include <sstream>
#include "tests/loops/failing_backward.h"

namespace tessera::loops::writes_test {
using namespace internal;
namespace {

TESSERA_LOOPS(Writes, all_setups);

// Elastic weight consolidation: keeps the weights of the first task, weighted by their Fisher information.
TEST_P(Writes, WeightsHeldWhereTheFirstTaskLeftThem) {
  play(GetParam(), {.same_data = true}, [](Trainer& run) {
    run.train(0);
    const auto parameters = run.model->parameters();
    std::vector<at::Tensor> kept, importance;
    for (const at::Tensor& gradient : torch::autograd::grad({run.loss(1)}, parameters))
      importance.push_back(gradient.square());
    for (const at::Tensor& parameter : parameters) kept.push_back(parameter.detach().clone());
    for (int step = 2; step < 5; ++step) {
      run.optimizer().zero_grad();
      at::Tensor loss = run.loss(step);
      for (size_t i = 0; i < kept.size(); ++i)
        loss = loss + 10 * (importance[i] * (parameters[i] - kept[i]).square()).sum();
      run.note(loss);
      loss.backward();
      run.optimizer().step();
    }
  });
}

// No step is taken between the first and the second backward: the saved values replace the learned ones.
TEST_P(Writes, ValuesPutBackInPlaceOfAStep) {
  for (const bool is_tiny : {false, true})
    play(GetParam(), {.model = is_tiny ? [] { return seeded_model<Tiny>(82); } : mlp}, [](Trainer& run) {
      std::vector<at::Tensor> saved;
      for (const auto& parameter : run.parameters()) saved.push_back(parameter.detach().clone());
      for (int step = 0; step < 6; ++step) {
        run.optimizer().zero_grad();
        const at::Tensor loss = run.loss(step);
        run.note(loss.detach());
        loss.backward();
        if (step % 3 != 1) {
          run.optimizer().step();
          continue;
        }
        const torch::NoGradGuard no_grad;
        auto parameters = run.parameters();
        for (size_t i = 0; i < saved.size(); ++i)
          if (saved[i].numel() > 0) parameters[i].copy_(saved[i]);
      }
    });
}

// Reptile: some steps, and then a part of the way back to the values before them.
TEST_P(Writes, PartOfTheWayBackAfterInnerSteps) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int task = 0; task < 3; ++task) {
      std::vector<at::Tensor> before;
      for (const auto& parameter : run.parameters()) before.push_back(parameter.detach().clone());
      run.optimizer().state().clear();
      for (int step = 0; step < 2; ++step) run.train(2 * task + step);
      const torch::NoGradGuard no_grad;
      auto parameters = run.parameters();
      for (size_t i = 0; i < before.size(); ++i) parameters[i].copy_(before[i].lerp(parameters[i], 0.3));
    }
  });
}

struct Nothing : Net {
  Nothing() { empty = register_parameter("empty", torch::zeros({0, kFeatures})); }
  at::Tensor forward(const at::Tensor& x) override { return x.tanh() + empty.sum(0); }
  at::Tensor empty;
};
struct None : Net {
  at::Tensor forward(const at::Tensor& x) override { return x.tanh(); }
};

bool has_shards(const Setup& setup) { return setup.stage == 3; }

// As torch::nn::init and "resume from" code do it.
TEST_P(Writes, CopyIntoAModuleParameterUnderNoGrad) {
  play(GetParam(), {.expect = has_shards(GetParam()) ? Expect::kEither : Expect::kEqual}, [](Trainer& run) {
    run.train(0);
    {
      torch::NoGradGuard no_grad;
      mlp_of(*run.model).fc2->weight.copy_(torch::full({kFeatures, kFeatures}, 0.1, at::kDouble));
      torch::nn::init::constant_(mlp_of(*run.model).fc1->bias, 0.25);
    }
    for (int step = 1; step < 4; ++step) run.train(step);
  });
}

TEST_P(Writes, MultipliedThroughDataBetweenSteps) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      run.train(step);
      for (auto& parameter : run.parameters()) parameter.data().mul_(0.9);
      torch::NoGradGuard no_grad;
      run.note(run.loss(9));
    }
  });
}

TEST_P(Writes, MultipliedUnderNoGradBetweenSteps) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      run.train(step);
      torch::NoGradGuard no_grad;
      for (auto& parameter : run.parameters()) parameter.mul_(0.9);
    }
  });
}

TEST_P(Writes, DecaysWhatHasAGradient) {
  if (is_at_owners(GetParam())) GTEST_SKIP() << kOwnersAlone;
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      for (at::Tensor& parameter : run.parameters())
        if (parameter.grad().defined()) parameter.data().mul_(0.99);
    }
  });
}

// Alike on all ranks.
TEST_P(Writes, ClampsAllParameters) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      run.train(step);
      for (at::Tensor& parameter : run.parameters()) parameter.data().clamp_(-0.25, 0.25);
      const at::NoGradGuard no_grad;
      if (step == 2)
        for (at::Tensor& parameter : run.parameters()) parameter.mul_(0.9);
    }
  });
}

TEST_P(Writes, ValuesInitialisedAfterWrapping) {
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

TEST_P(Writes, TheBestValuesArePutBack) {
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

TEST_P(Writes, NormsOfValuesAreLookedAt) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      for (const auto& entry : run.model->named_parameters()) run.note(entry.value().norm());
    }
  });
}

TEST_P(Writes, ValuesClampedAfterEachStep) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      const torch::NoGradGuard no_grad;
      for (auto& parameter : run.parameters()) parameter.clamp_(-0.2, 0.2);
    }
  });
}

// Prints a summary before training.
TEST_P(Writes, ParametersAreCountedAndPrinted) {
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

// All ranks write equal values, although their gradients by inputs differ.
TEST_P(Writes, SaliencyOfInputsThenOtherValues) {
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

}  // namespace
}  // namespace tessera::loops::writes_test
