// Parameters that get other data: torch::load(), to(), set_data(), vector_to_parameters().
#include "tests/loops/loops.h"

#include <torch/library.h>
#include <future>
#include <optional>
#include <sstream>

namespace tessera::loops::set_data_test {
using namespace internal;
namespace {

TESSERA_LOOPS(SetData, all_setups);

// Returns another model's values, as torch::save writes them.
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

TEST_P(SetData, LoadBeforeWrapping) {
  auto loaded = [] {
    Model model = mlp();
    load(model);
    return model;
  };
  play(GetParam(), {.model = loaded}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

TEST_P(SetData, LoadBetweenSteps) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 2; ++step) run.train(step);
    load(run.model);
    for (int step = 2; step < 5; ++step) run.train(step);
  });
}

TEST_P(SetData, LoadBetweenBackwardAndStepWithAValidation) {
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

TEST_P(SetData, LoadBeforeTheFirstStep) {
  play(GetParam(), {}, [](Trainer& run) {
    load(run.model);
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

// The loaded values are written to before the first step, as when load_checkpoint() resumes.
TEST_P(SetData, LoadBeforeTheFirstStepAndWrittenOver) {
  play(GetParam(), {}, [](Trainer& run) {
    load(run.model);
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : run.parameters()) parameter.mul_(0.5);
    }
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

TEST_P(SetData, LoadedValuesAreReadAtOnce) {
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

TEST_P(SetData, LoadInsideSummonFullParams) {
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

TEST_P(SetData, CastAfterWrapping) {
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

TEST_P(SetData, CastToTheSameTypeChangesNothing) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) {
      run.model->to(at::kDouble);
      run.model->to(at::kCPU);
      run.train(step);
    }
  });
}

TEST_P(SetData, VectorToParameters) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    const auto values = torch::nn::utils::parameters_to_vector(another_mlp()->parameters()).detach();
    torch::nn::utils::vector_to_parameters(values, run.model->parameters());
    for (const auto& entry : run.state()) run.note(entry.value().square().sum());  // before a forward has seen them
    for (int step = 1; step < 4; ++step) run.train(step);
  });
}

TEST_P(SetData, SetDataOfOneParameterOfAUnit) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    mlp_of(*run.model).fc2->weight.set_data(torch::full({kFeatures, kFeatures}, 0.1, at::kDouble));
    for (int step = 1; step < 4; ++step) run.train(step);
  });
}

// The same values in another order of memory (channels-last, for one), and back.
TEST_P(SetData, SetDataOfOtherStrides) {
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

// set_data() replaces values that backward needs, and the new values are read before backward begins.
TEST_P(SetData, SetDataThenALookBetweenForwardAndBackward) {
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

std::vector<at::Tensor> halves(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> values;
  for (const auto& parameter : parameters) values.push_back(parameter.detach() * 0.5);
  return values;
}

TEST_P(SetData, AVectorForTheWrappersParameters) {
  const bool is_sharded = GetParam().stage == 3;
  play(GetParam(),
       {.expect = is_sharded ? Expect::kRefused : Expect::kEqual,
        .says = {"was replaced after wrapping (by set_data() on fsdp.parameters())"}},
       [](Trainer& run) {
         const auto halve = [&run] {
           const auto values = torch::nn::utils::parameters_to_vector(halves(run.parameters()));
           torch::nn::utils::vector_to_parameters(values, run.parameters());
         };
         run.train(0);
         halve();
         run.note_state(run);  // before a forward has seen them
         run.train(1);
         run.optimizer().zero_grad();
         run.loss(2).backward();
         halve();
         run.optimizer().step();
         run.train(3);
         halve();
       });
}

TEST_P(SetData, OtherDataForOneOfTheWrappersParameters) {
  const bool is_sharded = GetParam().stage == 3;
  play(GetParam(),
       {.expect = is_sharded ? Expect::kRefused : Expect::kEqual,
        .says = {"was replaced after wrapping (by set_data() on fsdp.parameters())"}},
       [](Trainer& run) {
         run.train(0);
         at::Tensor one = run.parameters()[2];
         one.set_data(one.detach() * 0.5);
         for (int step = 1; step < 4; ++step) run.train(step);
       });
}

TEST_P(SetData, OtherDataForTheWrappersParametersBeforeBackward) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    run.optimizer().zero_grad();
    const at::Tensor loss = run.loss(1);
    const auto values = halves(run.parameters());
    for (size_t i = 0; i < values.size(); ++i) run.parameters()[i].set_data(values[i]);
    loss.backward();
    run.optimizer().step();
    run.train(2);
  });
}

void swap_data(at::Tensor one, at::Tensor other) {
  const at::Tensor data = one.data();
  one.set_data(other.data());
  other.set_data(data);
}

TEST_P(SetData, TwoOfTheWrappersParametersSwapTheirData) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    const auto parameters = run.parameters();
    swap_data(parameters[0], parameters[2]);
    for (int step = 1; step < 4; ++step) run.train(step);
  });
}

TEST_P(SetData, AnAverageSwapsItsDataWithTheWrappersParameters) {
  play(GetParam(), {.expect = Expect::kEither}, [](Trainer& run) {
    run.train(0);
    const auto average = halves(run.parameters());
    for (int step = 1; step < 4; ++step) {
      const auto parameters = run.parameters();
      for (size_t i = 0; i < average.size(); ++i) swap_data(parameters[i], average[i]);
      run.train(step);
    }
  });
}

TEST_P(SetData, ValuesReplacedInsideForward) {
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

}  // namespace
}  // namespace tessera::loops::set_data_test
