// Loops of papers that ask autograd for gradients between the forwards and backwards of training: penalties on slopes
// with several forwards, saliency while gradients accumulate, the Fisher information of parameters.
#include "tests/loops/loops.h"

namespace tessera::loops::literature_test {
namespace {

TESSERA_LOOPS(Literature, all_setups);

struct Critic : Mlp {
  at::Tensor forward(const at::Tensor& x) override { return Mlp::forward(x).mean(1); }
};

// WGAN-GP: three forwards of the critic, whose slope at the first one's inputs is in the loss.
TEST_P(Literature, ACriticWithAPenaltyOnItsSlope) {
  play(GetParam(), {.rounding = 10}, [](Trainer& run) {
    const Model net = seeded_model<Critic>(4);
    net->to(run.device);
    const auto critic = run.another(net);
    const auto loss = [&](int step) {
      const at::Tensor real = run.y(step), fake = run(run.x(step)).detach();
      const at::Tensor between = (0.3 * fake + 0.7 * real).requires_grad_();
      const at::Tensor slope = torch::autograd::grad({(*critic)(between).sum()}, {between}, {}, true, true)[0];
      return (*critic)(fake).mean() - (*critic)(real).mean() + 10 * (slope.norm(2, 1) - 1).square().mean();
    };
    for (int step = 0; step < 2; ++step) {
      critic->optimizer().zero_grad();
      if (step == 1) {
        const auto scope = critic->no_sync();
        loss(5).backward();
      }
      const at::Tensor value = loss(step);
      run.note(value);
      value.backward();
      critic->optimizer().step();
      critic->optimizer().zero_grad();
      run.optimizer().zero_grad();
      (-(*critic)(run(run.x(step))).mean()).backward();
      run.optimizer().step();
    }
    run.note_state(*critic);
  });
}

void look_at_inputs(Trainer& run, int step) {
  const at::Tensor x = run.x(step).requires_grad_();
  run.note(torch::autograd::grad({run(x).sum()}, {x})[0].square().sum(1).mean());
}
// Of rows that all ranks have.
void look_at_parameters(Trainer& run, int step) {
  for (const at::Tensor& gradient : torch::autograd::grad({run.loss(step)}, run.model->parameters()))
    run.note(gradient.square().sum());
}

// Looks wherever one may.
void accumulate(Trainer& run, void (*look)(Trainer&, int step)) {
  for (int step = 0; step < 2; ++step) {
    run.optimizer().zero_grad();
    {
      const auto scope = run.no_sync();
      (run.loss(2 * step) / 2).backward();
      look(run, step);
    }
    look(run, step + 5);
    const at::Tensor loss = run.loss(2 * step + 1) / 2;
    look(run, step + 6);
    loss.backward();
    look(run, step + 7);
    run.clip_grad_norm_(0.05);
    run.optimizer().step();
    look(run, step + 8);
  }
}

TEST_P(Literature, SaliencyOfInputsWhileGradientsAccumulate) {
  play(GetParam(), {}, [](Trainer& run) { accumulate(run, look_at_inputs); });
}

TEST_P(Literature, FisherInformationWhileGradientsAccumulate) {
  play(GetParam(), {.same_data = true}, [](Trainer& run) { accumulate(run, look_at_parameters); });
}

// As long as nobody has put gradients there, they may be scaled, whatever autograd was asked for.
TEST_P(Literature, GradientsScaledAfterALookAtInputs) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 2; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      look_at_inputs(run, step);
      for (const auto& parameter : run.parameters())
        if (parameter.grad().defined()) parameter.grad().mul_(0.5);
      run.optimizer().step();
    }
  });
}

// Elastic weight consolidation: what the first task found is kept, weighted by its Fisher information.
TEST_P(Literature, WeightsHeldWhereTheFirstTaskLeftThem) {
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

// The first backward that a static graph sees gives parameters nothing.
// A pull that is not of the loss is handed to autograd as the gradient of the weight itself, in a tensor that the user
// goes on to write to.
TEST_P(Literature, APullOnAWeightInATensorThatIsUsedAgain) {
  play(GetParam(), {}, [](Trainer& run) {
    const at::Tensor weight = run.model->parameters()[2];  // of a Linear
    at::Tensor pull = torch::zeros(weight.sizes(), weight.options().requires_grad(false));
    const auto backward = [&](int step, double strength) {
      torch::autograd::backward({run.loss(step) / 2, weight}, {torch::ones({}, pull.options()), pull.fill_(strength)});
      pull.fill_(1e3);
    };
    for (int step = 0; step < 2; ++step) {
      run.optimizer().zero_grad();
      {
        const auto scope = run.no_sync();
        backward(2 * step, 0.05);
      }
      backward(2 * step + 1, 0.1);
      run.optimizer().step();
    }
  });
}

// That does nothing, as in one process: what somebody else has is not sent from where it lies.
TEST_P(Literature, AGradientThatAHookHasKeptIsWrittenTo) {
  play(GetParam(), {}, [](Trainer& run) {
    at::Tensor kept;
    Mlp& mlp = mlp_of(*run.model);
    mlp.fc3->weight.register_hook([&](const at::Tensor& gradient) { kept = gradient; });
    mlp.fc2->weight.register_hook([&](const at::Tensor&) {
      if (kept.defined()) kept.data().mul_(3);
    });
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

// Both gradients of a sum are one tensor.
TEST_P(Literature, TwoWeightsThatAreAddedHaveOneGradient) {
  struct Sum : Net {
    Sum() {
      slow = register_parameter("slow", torch::randn({kFeatures, kFeatures}));
      fast = register_parameter("fast", torch::randn({kFeatures, kFeatures}));
    }
    at::Tensor forward(const at::Tensor& x) override { return torch::linear(x, slow + fast); }
    at::Tensor slow, fast;
  };
  play(GetParam(), {.model = [] { return seeded_model<Sum>(6); }}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      if (step == 1) {
        const auto scope = run.no_sync();
        run.loss(5).backward();
      }
      run.loss(step).backward();
      run.optimizer().step();
    }
  });
}

TEST(LiteratureOwn, InputsAreLookedAtBeforeAStaticGraph) {
  on_ranks(2, [](std::shared_ptr<Communicator> comm) {
    const Model model = mlp(), alone = mlp();
    DistributedDataParallel ddp(model, comm, {.static_graph = true});
    for (int step = 0; step < 3; ++step) {
      const auto rows = seeded(7 + step, [] { return torch::randn({kRows, kFeatures}, at::kDouble); });
      const at::Tensor x = rows.detach().requires_grad_();
      torch::autograd::grad({ddp(x).sum()}, {x});
      ddp.zero_grad();
      ddp(rows).square().sum().backward();
      alone->zero_grad();
      alone->forward(rows).square().sum().backward();
      for (const auto& entry : alone->named_parameters())
        EXPECT_TRUE(torch::allclose(model->named_parameters()[entry.key()].grad(), entry.value().grad()))
            << entry.key();
    }
  });
}

}  // namespace
}  // namespace tessera::loops::literature_test
