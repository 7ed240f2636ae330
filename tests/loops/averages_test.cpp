// Averages of parameters, and target networks.
#include "tests/loops/loops.h"

#include <ATen/CPUGeneratorImpl.h>
#include <sstream>
#include <utility>
#include <vector>

namespace tessera::loops::averages_test {
using namespace internal;
namespace {

TESSERA_LOOPS(Averages, all_setups);

TEST_P(Averages, AverageOfGradientsOverStepsByHand) {
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

TEST_P(Averages, ValuesSwappedForTheAverageAndBack) {
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

TEST_P(Averages, AnAverageKeptInAList) {
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

TEST_P(Averages, AverageOfParametersInASecondModel) {
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

TEST_P(Averages, TargetNetworkCopiedEveryOtherStep) {
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

}  // namespace
}  // namespace tessera::loops::averages_test
