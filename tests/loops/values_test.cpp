// Parameters written by others than the optimizer: checkpoints, averages, casts, validation in between.
#include <sstream>

#include "tests/loops/loops.h"

namespace tessera::loops {
using namespace internal;
namespace {

TESSERA_LOOPS(Values, all_setups);

bool has_shards(const Setup& setup) { return setup.stage == 3; }

// What torch::save wrote of another model of this form.
std::string saved() {
  std::ostringstream file;
  torch::save(another_mlp(), file);
  return file.str();
}

void load(const Model& model) {
  std::istringstream file(saved());
  Model target = model;
  torch::load(target, file);
}

// ---- torch::load

TEST_P(Values, LoadBeforeWrapping) {
  auto loaded = [] {
    Model model = mlp();
    load(model);
    return model;
  };
  play(GetParam(), {.model = loaded}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

TEST_P(Values, LoadBetweenSteps) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 2; ++step) run.train(step);
    load(run.model);
    for (int step = 2; step < 5; ++step) run.train(step);
  });
}

// Steps of the same gradients, each on from what was loaded.
TEST_P(Values, LoadBetweenStepsOfOneBackward) {
  const bool drops_gradients = GetParam().name == "oss_sdp_offload_grads";
  play(GetParam(), {.expect = drops_gradients ? Expect::kEither : Expect::kEqual}, [](Trainer& run) {
    run.train(0);
    run.zero_grad();
    run.loss(1).backward();
    for (int again = 0; again < 2; ++again) {
      run.optimizer().step();
      load(run.model);
    }
    run.optimizer().step();
    run.train(2);
  });
}

TEST_P(Values, LoadBetweenBackwardAndStepWithAValidation) {
  play(GetParam(), {}, [](Trainer& run) {
    run.train(0);
    for (int step = 1; step < 3; ++step) {
      run.optimizer().zero_grad();
      run.loss(step).backward();
      load(run.model);
      {
        const torch::NoGradGuard no_grad;
        run.model->eval();
        run.note(run.loss(step + 5));
        run.model->train();
      }
      run.optimizer().step();
    }
    run.train(3);
  });
}

TEST_P(Values, LoadBeforeTheFirstStep) {
  play(GetParam(), {}, [](Trainer& run) {
    load(run.model);
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

// As load_checkpoint() does that resumes, if there is anything to resume from.
TEST_P(Values, LoadBeforeTheFirstStepAndWrittenOver) {
  play(GetParam(), {}, [](Trainer& run) {
    load(run.model);
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : run.parameters()) parameter.mul_(0.5);
    }
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

TEST_P(Values, LoadedValuesAreReadAtOnce) {
  play(GetParam(), {}, [](Trainer& run) {
    run.train(0);
    load(run.model);
    std::vector<at::Tensor> kept;
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : run.parameters()) kept.push_back(parameter * 0.5);
    }
    run.train(1);
    {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < kept.size(); ++i) run.parameters()[i].copy_(kept[i]);
    }
    run.train(2);
  });
}

// The decay is of what was loaded, which nothing has used yet.
TEST_P(Values, LoadBeforeAStepWithWeightDecay) {
  if (!has_shards(GetParam())) GTEST_SKIP() << "its optimizer is the one that it was made with";
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    torch::optim::SGD decayed(run.parameters(), torch::optim::SGDOptions(0.1).weight_decay(0.2));
    for (int step = 0; step < 3; ++step) {
      run.zero_grad();
      run.loss(step).backward();
      load(run.model);
      decayed.step();
    }
    run.note(run.loss(5));
  });
}

TEST_P(Values, LoadInsideSummonFullParams) {
  const bool can_summon = GetParam().name != "zero3";  // Zero has no such scope
  play(GetParam(), {.expect = can_summon ? Expect::kEqual : Expect::kEither}, [](Trainer& run) {
    for (int step = 0; step < 2; ++step) run.train(step);
    if (run.fsdp() != nullptr) {
      auto scope = run.fsdp()->summon_full_params();
      load(run.model);
    } else {
      load(run.model);
    }
    for (int step = 2; step < 5; ++step) run.train(step);
  });
}

// ---- module->to() and set_data. The models are in fp64.

TEST_P(Values, CastAfterWrapping) {
  play(GetParam(),
       {.expect = Expect::kRefused, .says = {" now, but was ", "was replaced after wrapping (by module.to()"}},
       [](Trainer& run) {
         run.train(0);
         run.optimizer().zero_grad();
         run.model->to(at::kFloat);
         torch::mse_loss(run(run.x(1).to(at::kFloat)), run.y(1).to(at::kFloat)).backward();
         run.optimizer().step();
       });
}

TEST_P(Values, CastToTheSameTypeChangesNothing) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.model->to(at::kDouble);
      run.model->to(at::kCPU);
      run.train(step);
    }
  });
}

TEST_P(Values, VectorToParameters) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    const auto values = torch::nn::utils::parameters_to_vector(another_mlp()->parameters()).detach();
    torch::nn::utils::vector_to_parameters(values, run.model->parameters());
    for (const auto& entry : run.state()) run.note(entry.value().square().sum());  // before a forward has seen them
    for (int step = 1; step < 4; ++step) run.train(step);
  });
}

TEST_P(Values, SetDataOfOneParameterOfAUnit) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    mlp_of(*run.model).fc2->weight.set_data(torch::full({kFeatures, kFeatures}, 0.1, at::kDouble));
    for (int step = 1; step < 4; ++step) run.train(step);
  });
}

// The same values in another order of memory, as what is made channels-last has them; and back.
TEST_P(Values, SetDataOfOtherStrides) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 5; ++step) {
      const bool turns = step == 1, returns = step == 3;
      for (auto& parameter : run.model->parameters()) {
        if (parameter.dim() != 2) continue;
        if (turns) parameter.set_data(parameter.detach().t().contiguous().t());
        if (returns) parameter.set_data(parameter.detach().contiguous());
      }
      run.train(step);
    }
  });
}

// What backward needs is gone, and something has looked at the new values before it begins.
TEST_P(Values, SetDataThenALookBetweenForwardAndBackward) {
  for (const bool evaluates : {false, true})
    play(GetParam(), {.expect = Expect::kEither}, [evaluates](Trainer& run) {
      run.train(0);
      run.optimizer().zero_grad();
      const at::Tensor loss = run.loss(1);
      mlp_of(*run.model).fc2->weight.set_data(torch::full({kFeatures, kFeatures}, 0.1, at::kDouble));
      if (evaluates) {
        const torch::NoGradGuard no_grad;
        run.note(run.loss(2));
      } else {
        run.note(run.state()["fc2.weight"].square().sum());
      }
      loss.backward();
      run.optimizer().step();
      run.train(3);
    });
}

// As torch::nn::init and "resume from" code do it.
TEST_P(Values, CopyIntoAModuleParameterUnderNoGrad) {
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

// ---- values that the user writes through the wrapper's parameters()

TEST_P(Values, MultipliedThroughDataBetweenSteps) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      run.train(step);
      for (auto& parameter : run.parameters()) parameter.data().mul_(0.9);
      torch::NoGradGuard no_grad;
      run.note(run.loss(9));
    }
  });
}

TEST_P(Values, MultipliedUnderNoGradBetweenSteps) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      run.train(step);
      torch::NoGradGuard no_grad;
      for (auto& parameter : run.parameters()) parameter.mul_(0.9);
    }
  });
}

// Units that a validation has gathered must not be those that training goes on with after the step.
TEST_P(Values, ValidationBetweenBackwardAndStep) {
  for (bool through_wrapper : {true, false}) {
    play(GetParam(), {}, [through_wrapper](Trainer& run) {
      auto validate = [&] {
        torch::NoGradGuard no_grad;
        const at::Tensor y = through_wrapper ? run(run.x(9)) : run.model->forward(run.x(9));
        run.note(torch::mse_loss(y, run.y(9)));
      };
      for (int step = 0; step < 4; ++step) {
        run.optimizer().zero_grad();
        at::Tensor loss = run.loss(step);
        loss.backward();
        validate();
        run.optimizer().step();
        validate();
      }
    });
  }
}

TEST_P(Values, ValidationBetweenForwardAndBackward) {
  for (bool through_wrapper : {true, false}) {
    play(GetParam(), {}, [through_wrapper](Trainer& run) {
      for (int step = 0; step < 3; ++step) {
        run.optimizer().zero_grad();
        at::Tensor loss = run.loss(step);
        {
          torch::NoGradGuard no_grad;
          const at::Tensor y = through_wrapper ? run(run.x(9)) : run.model->forward(run.x(9));
          run.note(torch::mse_loss(y, run.y(9)));
        }
        loss.backward();
        run.optimizer().step();
      }
    });
  }
}

// A validation without NoGradGuard: a graph that no backward ever comes for.
TEST_P(Values, ValidationThatForgetsNoGrad) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.train(step);
      run.note(run.loss(9).detach());
    }
  });
}

// ---- a second model that follows the first

TEST_P(Values, AverageOfParametersInASecondModel) {
  play(GetParam(), {}, [](Trainer& run) {
    auto average = run.another(mlp());
    for (int step = 0; step < 4; ++step) {
      run.train(step);
      auto target = average->parameters(), source = run.parameters();
      for (size_t i = 0; i < target.size(); ++i) target[i].data().mul_(0.9).add_(source[i].data(), 0.1);
      torch::NoGradGuard no_grad;
      run.note(torch::mse_loss((*average)(run.x(step)), run.y(step)));
    }
    run.note_state(*average);
  });
}

TEST_P(Values, TargetNetworkCopiedEveryOtherStep) {
  play(GetParam(), {}, [](Trainer& run) {
    auto target = run.another(mlp());
    for (int step = 0; step < 5; ++step) {
      run.optimizer().zero_grad();
      at::Tensor wanted;
      {
        torch::NoGradGuard no_grad;
        wanted = run.y(step) + 0.9 * target->model->forward(run.x(step));
      }
      at::Tensor loss = torch::mse_loss(run(run.x(step)), wanted);
      run.note(loss.detach());
      loss.backward();
      run.optimizer().step();
      if (step % 2 == 0) continue;
      auto to = target->parameters(), from = run.parameters();
      for (size_t i = 0; i < to.size(); ++i) to[i].data().copy_(from[i].data());
    }
  });
}

// ---- one memory behind two parameters

TEST_P(Values, TwoParametersOfOneMemory) {
  auto shared = [] {
    Model model = mlp();
    mlp_of(*model).fc3->weight.set_data(mlp_of(*model).fc1->weight.data());
    return model;
  };
  play(GetParam(), {.expect = Expect::kEither, .model = shared}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

}  // namespace
}  // namespace tessera::loops
