// Several things at a time: weights that thaw while gradients accumulate, two wrapped models of which one waits, an
// optimizer by hand that skips what is empty, modules of nothing.
#include <ATen/CPUGeneratorImpl.h>

#include <map>

#include "tests/loops/failing_backward.h"

namespace tessera::loops::combined_test {
namespace {

TESSERA_LOOPS(Combined, all_setups);

bool is_sharded(const Setup& setup) { return setup.stage == 3; }

void step_with(Trainer& run, const at::Tensor& loss) {
  run.note(loss.detach());
  loss.backward();
  run.optimizer().step();
  run.optimizer().zero_grad();
}

void set_frozen(torch::nn::Module& module, bool frozen) {
  for (auto& parameter : module.parameters()) parameter.requires_grad_(!frozen);
}

// ---- schedules

TEST_P(Combined, LayersThawOneAfterAnotherWhileGradientsAccumulate) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    auto& net = mlp_of(*run.model);
    set_frozen(*net.fc1, true);
    set_frozen(*net.fc2, true);
    for (int step = 0; step < 5; ++step) {
      if (step == 1) set_frozen(*net.fc2, false);
      if (step == 3) set_frozen(*net.fc1, false);
      {
        const ScopeExit alone = run.no_sync();
        (run.loss(2 * step) / 2).backward();
      }
      step_with(run, run.loss(2 * step + 1) / 2);
    }
  });
}

// In the middle of what is accumulated.
TEST_P(Combined, ALayerThawsBetweenTwoParts) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    auto& net = mlp_of(*run.model);
    for (int step = 0; step < 4; ++step) {
      set_frozen(*net.fc2, step % 2 == 0);
      {
        const ScopeExit alone = run.no_sync();
        run.loss(2 * step).backward();
      }
      set_frozen(*net.fc2, step % 2 == 1);
      step_with(run, run.loss(2 * step + 1));
    }
  });
}

// A layer that is frozen once has no gradient from then on, not even one of zeros: momentum would go on with it.
void train_with_a_frozen_layer(Trainer& run, const std::function<void(Mlp&)>& freeze) {
  auto& net = mlp_of(*run.model);
  run.train(0);
  freeze(net);
  for (int step = 4; step < 7; ++step) run.train(step);
  set_frozen(*net.fc2, false);
  run.train(7);
}

TEST_P(Combined, ALayerIsFrozenAfterAForwardThatWasForLooking) {
  for (const bool unused : {false, true})
    play(GetParam(), {.unused = unused}, [](Trainer& run) {
      train_with_a_frozen_layer(run, [&](Mlp& net) {
        run.note(run.loss(1).detach());
        set_frozen(*net.fc2, true);
      });
    });
}

TEST_P(Combined, ALayerIsFrozenAfterAForwardThatThrew) {
  play(GetParam(), {}, [](Trainer& run) {
    train_with_a_frozen_layer(run, [&](Mlp& net) {
      EXPECT_ANY_THROW(run(torch::ones({2, kFeatures + 1}, at::kDouble)));
      set_frozen(*net.fc2, true);
    });
  });
}

TEST_P(Combined, ALayerIsFrozenAndWhatNoSyncGatheredIsCleared) {
  play(GetParam(), {}, [](Trainer& run) {
    train_with_a_frozen_layer(run, [&](Mlp& net) {
      run.optimizer().zero_grad();
      {
        const ScopeExit alone = run.no_sync();
        run.loss(1).backward();
      }
      set_frozen(*net.fc2, true);
      run.optimizer().zero_grad();
    });
  });
}

TEST_P(Combined, ALayerIsFrozenForAValidationBetweenTwoParts) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    auto& net = mlp_of(*run.model);
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      {
        const ScopeExit alone = run.no_sync();
        run.loss(3 * step).backward();
      }
      set_frozen(*net.fc2, true);
      run.note(run.loss(3 * step + 1).detach());
      set_frozen(*net.fc2, false);
      run.loss(3 * step + 2).backward();
      run.optimizer().step();
    }
  });
}

// Of `rows` rows, those of this rank.
at::Tensor own_rows(const Trainer& run, const at::Tensor& all, int64_t rows) {
  return all.slice(0, rows * run.rank / run.world, rows * (run.rank + 1) / run.world);
}

// The last one has fewer rows, fewer than two for each rank, and fewer parts; sums are divided by the rows of all.
TEST_P(Combined, PartsOfOtherNumbersAndAShortLastBatch) {
  play(GetParam(), {.same_data = true}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      const int parts = 1 + (step + 1) % 3;
      const int64_t rows = step == 3 ? 5 : kRows;
      run.divide_gradients_by_sum(parts * own_rows(run, run.x(0), rows).size(0));
      for (int part = 0; part < parts; ++part) {
        std::unique_ptr<ScopeExit> alone;
        if (part + 1 < parts) alone = std::make_unique<ScopeExit>(run.no_sync());
        const at::Tensor x = own_rows(run, run.x(3 * step + part), rows);
        (run(x) - own_rows(run, run.y(3 * step + part), rows)).square().sum().backward();
      }
      run.notes.push_back(run.clip_grad_norm_(5));
      run.optimizer().step();
      run.optimizer().zero_grad();
    }
  });
}

// ---- optimizers by hand

// As people write it who have met an empty shard.
void train_by_hand(Trainer& run, bool to_none) {
  for (int step = 0; step < 4; ++step) {
    const at::Tensor loss = run.loss(step);
    run.note(loss.detach());
    loss.backward();
    for (auto& parameter : run.parameters()) {
      if (parameter.numel() == 0 || !parameter.grad().defined()) continue;
      parameter.data().sub_(parameter.grad(), 0.1);
      to_none ? parameter.mutable_grad().reset() : static_cast<void>(parameter.mutable_grad().zero_());
    }
  }
}

TEST_P(Combined, AnOptimizerByHandThatSkipsWhatIsEmpty) {
  if (GetParam().stage == 2) GTEST_SKIP() << kOwnersAlone;
  play(GetParam(), {}, [](Trainer& run) { train_by_hand(run, /*to_none=*/true); });
}

struct Tiny : Net {
  Tiny() { scale = register_parameter("scale", torch::tensor({0.5, 0.25})); }
  at::Tensor forward(const at::Tensor& x) override { return x * scale[0] + scale[1]; }
  at::Tensor scale;
};

TEST_P(Combined, AnOptimizerByHandOfFewerNumbersThanRanks) {
  if (GetParam().stage == 2) GTEST_SKIP() << kOwnersAlone;
  play(GetParam(), {.model = [] { return seeded_model<Tiny>(81); }},
       [](Trainer& run) { train_by_hand(run, /*to_none=*/false); });
}

// Nothing is stepped between the first and the second backward: what was learnt is given up for what was saved.
TEST_P(Combined, ValuesPutBackInPlaceOfAStep) {
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

// Reptile: some steps away from where it was, and part of the way back.
TEST_P(Combined, PartOfTheWayBackAfterInnerSteps) {
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

// A value for everybody, between backward and step, and none of the gradients that are there.
TEST_P(Combined, GradientsOfTwoGraphsOfWhichOneIsDropped) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = run.loss(step);
      loss.backward({}, /*retain_graph=*/true);
      run.optimizer().zero_grad();
      (2 * loss).backward();
      run.note(loss.detach());
      run.optimizer().step();
      run.optimizer().zero_grad();
    }
  });
}

// ---- two wrapped models

TEST_P(Combined, OneOfTwoModelsWaitsForTheOther) {
  play(GetParam(), {}, [](Trainer& run) {
    auto decoder = run.another(another_mlp());
    for (int step = 0; step < 3; ++step) {
      {
        const ScopeExit alone = decoder->no_sync();
        const at::Tensor loss = torch::mse_loss((*decoder)(run(run.x(2 * step))), run.y(2 * step));
        run.note(loss.detach());
        loss.backward();
      }
      run.optimizer().step();
      run.optimizer().zero_grad();
      torch::mse_loss((*decoder)(run(run.x(2 * step + 1))), run.y(2 * step + 1)).backward();
      run.optimizer().step();
      decoder->optimizer().step();
      run.optimizer().zero_grad();
      decoder->optimizer().zero_grad();
    }
    run.note_state(*decoder);
  });
}

// Frozen, wrapped, evaluated with and without a graph; then trained.
TEST_P(Combined, ATeacherThatIsFrozenAndTrainedInTheEnd) {
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    auto teacher = run.another(another_mlp());
    set_frozen(*teacher->model, true);
    for (int step = 0; step < 4; ++step) {
      at::Tensor wanted;
      {
        const torch::AutoGradMode mode(step % 2 == 0);
        wanted = (*teacher)(run.x(step)).detach();
      }
      step_with(run, torch::mse_loss(run(run.x(step)), wanted) + torch::mse_loss(run(run.x(step)), run.y(step)));
    }
    set_frozen(*teacher->model, false);
    teacher->train(5);
    run.note_state(*teacher);
  });
}

// SimSiam: two views, and a predictor behind each, whose target is held still.
TEST_P(Combined, TwoViewsAndAPredictor) {
  play(GetParam(), {}, [](Trainer& run) {
    auto predictor = run.another(another_mlp());
    for (int step = 0; step < 3; ++step) {
      const at::Tensor a = run(run.x(step)), b = run(run.x(step) + 0.1 * run.y(step));
      const at::Tensor pa = (*predictor)(a), pb = (*predictor)(b);
      const at::Tensor loss = torch::mse_loss(pa, b.detach()) + torch::mse_loss(pb, a.detach());
      step_with(run, loss);
      predictor->optimizer().step();
      predictor->optimizer().zero_grad();
    }
    run.note_state(*predictor);
  });
}

// The critic learns several times for each time that the actor does, whose loss goes through it while it waits.
TEST_P(Combined, ACriticThatWaitsWhileTheActorLearnsThroughIt) {
  play(GetParam(), {}, [](Trainer& run) {
    auto critic = run.another(another_mlp());
    for (int step = 0; step < 3; ++step) {
      at::Tensor wanted;
      {
        const torch::NoGradGuard no_grad;
        wanted = run.y(step) + 0.5 * (*critic)(run(run.x(step)));
      }
      step_with(*critic, torch::mse_loss((*critic)(run.x(step)), wanted));
      {
        const ScopeExit alone = critic->no_sync();
        step_with(run, (*critic)(run(run.x(step))).mean());
      }
      critic->optimizer().zero_grad();
    }
    for (double each : critic->notes) run.notes.push_back(each);
    run.note_state(*critic);
  });
}

// ---- failures

TEST_P(Combined, AHookOnAWeightThrowsAndIsTakenAway) {
  play(GetParam(), {}, [](Trainer& run) {
    const at::Tensor weight = mlp_of(*run.model).fc2->weight;
    for (int step = 0; step < 4; ++step) {
      if (step % 2 == 1) {
        run.optimizer().zero_grad();
        const unsigned position =
            weight.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("the user's hook"); });
        expect_users_error([&] { run.loss(step + 7).backward(); });
        weight.remove_hook(position);
        run.optimizer().zero_grad();
      }
      run.train(step);
    }
  });
}

TEST_P(Combined, AClosureThatThrowsAtItsFirstCall) {
  play(GetParam(), {}, [](Trainer& run) {
    run.train(0);
    for (int step = 1; step < 4; ++step) {
      int calls = 0;
      auto closure = [&] {
        run.optimizer().zero_grad();
        const at::Tensor loss = run.loss(step);
        if (step == 2 && calls++ == 0) throw std::runtime_error("the user's hook");
        loss.backward();
        return loss;
      };
      if (step == 2) expect_users_error([&] { run.optimizer().step(closure); });
      run.note(run.optimizer().step(closure));
    }
  });
}

TEST_P(Combined, AnExceptionLeavesNoSync) {
  play(GetParam(), {}, [](Trainer& run) {
    run.train(0);
    run.optimizer().zero_grad();
    expect_users_error([&] {
      const ScopeExit alone = run.no_sync();
      run.loss(1).backward();
      const at::Tensor loss = run.loss(2);
      throw std::runtime_error("the user's hook");
    });
    run.loss(3).backward();  // adds to what the first left
    run.optimizer().step();
    run.train(4);
  });
}

// What one process does, too: the graph of the step before is gone.
TEST_P(Combined, TheLastStepsOutputIsNotDetached) {
  play(GetParam(), {.expect = Expect::kThrows}, [](Trainer& run) {
    at::Tensor last = torch::zeros({}, at::kDouble);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor out = run(run.x(step) + last);
      step_with(run, torch::mse_loss(out, run.y(step)));
      last = out;
    }
  });
}

TESSERA_LOOPS(CombinedCopies, replicated_setups);

bool on_any_rank(Trainer& run, bool flag) {
  if (run.shards() == nullptr) return flag;
  at::Tensor any = torch::full({1}, flag ? 1. : 0.).to(run.device);
  run.shards()->comm()->all_reduce(any, ReduceOp::kMax, "a flag").wait();
  return run.shards()->comm()->to_host(any, "a flag").item<double>() > 0;
}

// One rank's data are no good: all know before they go on.
TEST_P(CombinedCopies, AForwardThatFailsOnOneRankIsGivenUpByAll) {
  play(GetParam(), {}, [](Trainer& run) {
    Mlp& net = mlp_of(*run.model);
    for (int step = 0; step < 5; ++step) {
      run.optimizer().zero_grad();
      bool failed = false;
      at::Tensor loss;
      if (step == 2 && run.rank == run.world - 1) net.in_forward = [] { throw std::runtime_error("no data"); };
      try {
        loss = run.loss(step);
      } catch (const std::runtime_error&) {
        failed = true;
      }
      net.in_forward = nullptr;
      if (on_any_rank(run, failed)) continue;
      run.note(loss.detach());
      loss.backward();
      run.optimizer().step();
    }
  });
}

// That rank tries again, and nobody else knows.
TEST_P(CombinedCopies, AForwardThatFailsOnOneRankIsCalledAgainThere) {
  play(GetParam(), {}, [](Trainer& run) {
    Mlp& net = mlp_of(*run.model);
    for (int step = 0; step < 4; ++step) {
      if (step == 2 && run.rank == run.world - 1) {
        net.in_forward = [] { throw std::runtime_error("the user's hook"); };
        expect_users_error([&] { run.loss(step); });
        net.in_forward = nullptr;
      }
      run.train(step);
    }
  });
}

// ---- modes

TEST_P(Combined, EvaluationModeBetweenForwardAndBackward) {
  struct Normed : Mlp {
    Normed() { register_module("norm", norm); }
    at::Tensor forward(const at::Tensor& x) override { return fc3(fc2(norm(fc1(x)).tanh())); }
    torch::nn::BatchNorm1d norm{kFeatures};
  };
  play(GetParam(), {.model = [] { return seeded_model<Normed>(83); }, .same_data = true}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor loss = run.loss(step);
      run.model->eval();
      {
        const torch::NoGradGuard no_grad;
        run.note(run.loss(9));
      }
      loss.backward();
      run.model->train();
      run.optimizer().step();
    }
  });
}

// ---- models

struct LowRank : Net {
  LowRank() {
    register_module("base", base);
    register_module("head", head);
    down = register_parameter("down", torch::randn({kFeatures, 2}) * 0.1);
    up = register_parameter("up", torch::zeros({2, kFeatures}));
    for (auto& parameter : base->parameters()) parameter.requires_grad_(false);
  }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor h = checkpointed(
        [this](const at::Tensor& input) { return (base(input) + input.matmul(down).matmul(up)).tanh(); }, x);
    return head(checkpointed([this](const at::Tensor& input) { return base(input).tanh(); }, h));
  }
  torch::nn::Linear base{kFeatures, kFeatures}, head{kFeatures, kFeatures};
  at::Tensor down, up;
};

// The frozen base is used twice, computed again in backward, and thaws in the end.
TEST_P(Combined, ACheckpointedFrozenBaseWithAdapters) {
  play(GetParam(), {.model = [] { return seeded_model<LowRank>(84); }, .unused = true}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      if (step == 3) set_frozen(*dynamic_cast<LowRank&>(*run.model).base, false);
      {
        const ScopeExit alone = run.no_sync();
        const at::Tensor x = run.x(2 * step).requires_grad_();
        torch::mse_loss(run(x), run.y(2 * step)).backward();
      }
      step_with(run, torch::mse_loss(run(run.x(2 * step + 1).requires_grad_()), run.y(2 * step + 1)));
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

TEST_P(Combined, AModelOfNothingBeforeOneOfSomething) {
  play(GetParam(), {}, [](Trainer& run) {
    auto first = run.another(seeded_model<Nothing>(85));
    for (int step = 0; step < 3; ++step) {
      step_with(run, torch::mse_loss(run((*first)(run.x(step))), run.y(step)));
      first->optimizer().step();
      first->optimizer().zero_grad();
    }
  });
}

TEST_P(Combined, AModelWithoutParametersBeforeOneWithSome) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    auto first = run.another(seeded_model<None>(86));
    for (int step = 0; step < 3; ++step) step_with(run, torch::mse_loss(run((*first)(run.x(step))), run.y(step)));
  });
}

// Only some of the parameters are the optimizer's; those of a layer that thaws come as a group of their own.
TEST_P(Combined, AGroupForEachLayerThatThaws) {
  if (GetParam().stage == 2 || GetParam().stage == 1) return;  // an optimizer of its own
  play(GetParam(), {.unused = true}, [](Trainer& run) {
    auto& net = mlp_of(*run.model);
    set_frozen(*net.fc1, true);
    set_frozen(*net.fc2, true);
    const auto all = run.parameters();
    torch::optim::Adam optimizer(std::vector<at::Tensor>{all[4], all[5]}, torch::optim::AdamOptions(1e-2));
    for (int step = 0; step < 4; ++step) {
      if (step == 2) {
        set_frozen(*net.fc2, false);
        optimizer.add_param_group(torch::optim::OptimizerParamGroup({all[2], all[3]}));
      }
      optimizer.zero_grad();
      const at::Tensor loss = run.loss(step);
      run.note(loss.detach());
      loss.backward();
      optimizer.step();
    }
  });
}

TEST_P(Combined, ClippedByValueThroughTheModule) {
  play(GetParam(),
       {.expect = is_sharded(GetParam()) ? Expect::kRefused : Expect::kEqual, .says = {"is in the wrapper's shards"}},
       [](Trainer& run) {
         for (int step = 0; step < 3; ++step) {
           run.optimizer().zero_grad();
           run.loss(step).backward();
           torch::nn::utils::clip_grad_value_(run.model->parameters(), 1e-2);
           run.optimizer().step();
         }
       });
}

// ---- what is not made by one setup

struct Parts {
  torch::nn::Linear first = linear(91), second = linear(92);
  static torch::nn::Linear linear(uint64_t seed) {
    return seeded(seed, [] {
      torch::nn::Linear made(kFeatures, kFeatures);
      made->to(at::kDouble);
      return made;
    });
  }
  std::vector<at::Tensor> values() const {
    std::vector<at::Tensor> all;
    for (const auto& part : {first, second})
      for (const auto& parameter : part->parameters()) all.push_back(parameter.detach().clone());
    return all;
  }
};

at::Tensor rows(int step) {
  return torch::randn({kRows, kFeatures}, at::detail::createCPUGenerator(static_cast<uint64_t>(step)), at::kDouble);
}
at::Tensor rows(int step, const Communicator& comm) {
  return rows(step).slice(0, kRows * comm.rank() / comm.size(), kRows * (comm.rank() + 1) / comm.size());
}

std::vector<at::Tensor> trained_alone(int steps) {
  Parts parts;
  std::vector<at::Tensor> all = parts.first->parameters();
  for (const auto& parameter : parts.second->parameters()) all.push_back(parameter);
  torch::optim::SGD optimizer(all, torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    torch::mse_loss(parts.second(parts.first(rows(2 * step)).tanh()), rows(2 * step + 1)).backward();
    optimizer.step();
  }
  return parts.values();
}

void expect_close(const std::vector<at::Tensor>& values, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(values.size(), expected.size());
  for (size_t i = 0; i < values.size(); ++i) EXPECT_TRUE(torch::allclose(values[i], expected[i], 1e-7, 1e-9)) << i;
}

// The one half is replicated, the other sharded; one backward goes through both.
TEST(CombinedOfTwoKinds, OneLossThroughTwoWrappers) {
  const auto expected = trained_alone(4);
  for (int world : {2, 3}) {
    on_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      Parts parts;
      DistributedDataParallel ddp(parts.first, comm);
      FullyShardedDataParallel fsdp(parts.second, comm);
      auto all = ddp.parameters();
      for (const auto& parameter : fsdp.parameters()) all.push_back(parameter);
      torch::optim::SGD optimizer(all, torch::optim::SGDOptions(0.1).momentum(0.9));
      for (int step = 0; step < 4; ++step) {
        optimizer.zero_grad();
        torch::mse_loss(fsdp(ddp(rows(2 * step, *comm)).tanh()), rows(2 * step + 1, *comm)).backward();
        optimizer.step();
      }
      const ScopeExit scope = fsdp.summon_full_params();
      expect_close(parts.values(), expected);
    });
  }
}

// Trained under one wrapper, then, without it, under another: the first leaves nothing behind that averages twice.
TEST(CombinedOfTwoKinds, OneWrapperAfterAnother) {
  const auto expected = trained_alone(6);
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Parts parts;
    torch::nn::Sequential model(parts.first, torch::nn::Functional(torch::tanh), parts.second);
    std::vector<at::Tensor> momenta(4);
    auto train = [&](auto& wrapper, int begin) {
      for (int step = begin; step < begin + 2; ++step) {
        wrapper.zero_grad();
        torch::mse_loss(wrapper.forward(rows(2 * step, *comm)), rows(2 * step + 1, *comm)).backward();
        const torch::NoGradGuard no_grad;
        auto parameters = wrapper.parameters();
        for (size_t i = 0; i < parameters.size(); ++i) {
          momenta[i] = momenta[i].defined() ? 0.9 * momenta[i] + parameters[i].grad() : parameters[i].grad().clone();
          parameters[i].sub_(0.1 * momenta[i]);
        }
      }
    };
    {
      DistributedDataParallel ddp(model, comm);
      train(ddp, 0);
    }
    {
      DistributedDataParallel ddp(model, comm, {.find_unused_parameters = true, .gradient_as_bucket_view = false});
      train(ddp, 2);
    }
    model->zero_grad();
    FullyShardedDataParallel fsdp(model, comm);
    auto parameters = fsdp.parameters();
    const auto shards = fsdp.named_shards();
    for (size_t i = 0; i < momenta.size(); ++i)
      momenta[i] = momenta[i].flatten().slice(0, shards[i].held.begin, shards[i].held.end).clone();
    train(fsdp, 4);
    const ScopeExit scope = fsdp.summon_full_params();
    expect_close(parts.values(), expected);
  });
}

// Batch norm over all ranks, in a part that is computed again, and evaluated between the parts of a step.
template <class Norm>
struct WithNorm : torch::nn::Module {
  explicit WithNorm(Norm made) : norm(std::move(made)) {
    register_module("first", parts.first), register_module("norm", norm), register_module("second", parts.second);
    norm->to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto part = [this](const at::Tensor& input) { return norm->forward(parts.first(input)).tanh(); };
    return parts.second(checkpointed(part, x));
  }
  void train_with(const std::function<at::Tensor(const at::Tensor&)>& call, torch::optim::Optimizer& optimizer,
                  const std::function<at::Tensor(int)>& batch) {
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      for (int part = 0; part < 2; ++part) {
        const int at = 4 * step + 2 * part;
        torch::mse_loss(call(batch(at).requires_grad_()), batch(at + 1)).backward();
        eval();
        {
          const torch::NoGradGuard no_grad;
          call(batch(99));
        }
        train();
      }
      optimizer.step();
    }
  }
  std::vector<at::Tensor> values() const {
    auto all = parts.values();
    for (const auto& buffer : buffers()) all.push_back(buffer.to(at::kDouble));
    return all;
  }
  Parts parts;
  Norm norm;
};

TEST(CombinedOfTwoKinds, BatchNormOverRanksInACheckpointedPart) {
  const torch::nn::BatchNormOptions options(kFeatures);
  auto alone = std::make_shared<WithNorm<torch::nn::BatchNorm1d>>(torch::nn::BatchNorm1d(options));
  torch::optim::SGD optimizer(alone->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  alone->train_with([&](const at::Tensor& x) { return alone->forward(x); }, optimizer, [](int at) { return rows(at); });
  for (int stage = 0; stage < 4; ++stage) {
    on_ranks(stage == 0 ? 3 : 2, [&](std::shared_ptr<Communicator> comm) {
      auto model = std::make_shared<WithNorm<SyncBatchNorm>>(SyncBatchNorm(options, *comm));
      auto wrapper = zero(model, torch::optim::SGDOptions(0.1).momentum(0.9), comm,
                          {.stage = stage, .fsdp = {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()}});
      model->train_with([&](const at::Tensor& x) { return wrapper(x); }, wrapper.optimizer(),
                        [&](int at) { return rows(at, *comm); });
      auto state = wrapper.full_state_dict();
      for (const auto& entry : alone->named_parameters())
        EXPECT_TRUE(torch::allclose(state[entry.key()], entry.value().detach(), 1e-7, 1e-9)) << stage << entry.key();
      for (const auto& entry : alone->named_buffers())
        EXPECT_TRUE(torch::allclose(state[entry.key()], entry.value(), 1e-7, 1e-9)) << stage << entry.key();
    });
  }
}

// Inputs in a map and an optional one, outputs of a program's own type, in which nobody finds tensors.
struct Opinion {
  at::Tensor mean, hidden;
  std::optional<at::Tensor> nothing;
  int calls = 0;
};
struct OfOpinions : torch::nn::Module {
  OfOpinions() { register_module("first", parts.first), register_module("second", parts.second); }
  Opinion forward(const std::map<std::string, at::Tensor>& inputs, const std::optional<at::Tensor>& scale) {
    const at::Tensor h = parts.first(inputs.at("x")).tanh();
    return {parts.second(scale ? h * *scale : h), h.detach(), std::nullopt, ++calls};
  }
  Parts parts;
  int calls = 0;
};

TEST(CombinedOfTwoKinds, OutputsOfTheProgramsOwnType) {
  const auto expected = trained_alone(4);
  for (int stage = 0; stage < 4; ++stage) {
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      auto model = std::make_shared<OfOpinions>();
      auto wrapper = zero(model, torch::optim::SGDOptions(0.1).momentum(0.9), comm,
                          {.stage = stage, .fsdp = {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()}});
      for (int step = 0; step < 4; ++step) {
        wrapper.optimizer().zero_grad();
        const std::map<std::string, at::Tensor> inputs{{"x", rows(2 * step, *comm)}};
        const Opinion opinion = wrapper(inputs, std::optional<at::Tensor>());
        EXPECT_EQ(opinion.calls, step + 1);
        torch::mse_loss(opinion.mean, rows(2 * step + 1, *comm)).backward();
        wrapper.step();
      }
      auto state = wrapper.full_state_dict();
      std::vector<at::Tensor> values;
      for (const auto& entry : model->named_parameters()) values.push_back(state[entry.key()]);
      expect_close(values, expected);
    });
  }
}

// Five ranks for two numbers.
TEST(CombinedOfTwoKinds, MoreRanksThanNumbers) {
  for (int stage = 0; stage < 4; ++stage) {
    on_ranks(5, [&](std::shared_ptr<Communicator> comm) {
      const auto loss_of = [](const at::Tensor& out) { return (out - 1).square().mean(); };
      const Model model = seeded_model<Tiny>(93), alone = seeded_model<Tiny>(93);
      torch::optim::Adam optimizer(alone->parameters(), torch::optim::AdamOptions(1e-2));
      auto wrapper = zero(model, torch::optim::AdamOptions(1e-2), comm, {.stage = stage});
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        loss_of(alone->forward(rows(step))).backward();
        optimizer.step();
        wrapper.optimizer().zero_grad();
        loss_of(wrapper(rows(step))).backward();
        wrapper.step();
      }
      EXPECT_TRUE(torch::allclose(wrapper.full_state_dict()["scale"], alone->parameters()[0].detach(), 1e-7, 1e-9));
    });
  }
}

}  // namespace
}  // namespace tessera::loops::combined_test
