#pragma once

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "tests/loops/loops.h"

namespace tessera::loops {
using namespace internal;

// backward() of this loss throws once, at fc2's output: fc3 has its gradients by then.
inline at::Tensor failing_loss(Trainer& run, int step) {
  Mlp& net = mlp_of(*run.model);
  auto has_thrown = std::make_shared<bool>(false);
  net.hook = [has_thrown](const at::Tensor& gradient) -> at::Tensor {
    if (!std::exchange(*has_thrown, true)) throw std::runtime_error("the user's hook");
    return gradient;
  };
  at::Tensor loss = run.loss(step);
  net.hook = nullptr;
  return loss;
}

inline void expect_users_error(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    if (std::string(error.what()).find("the user's hook") != std::string::npos) return;
    throw;
  }
  throw std::runtime_error("the user's exception was lost");
}

}  // namespace tessera::loops
