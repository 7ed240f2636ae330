#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <functional>
#include <utility>

namespace tessera {

// Sees a parameter's gradient before autograd accumulates it (add it to the parameter's gradient
// accumulator as a pre-hook), and says what is to be accumulated: an undefined tensor for nothing.
class GradientHook : public torch::autograd::FunctionPreHook {
 public:
  using Take = std::function<at::Tensor(const at::Tensor& gradient)>;
  explicit GradientHook(Take take) : take_(std::move(take)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    return {take_(gradients.at(0))};
  }

 private:
  Take take_;
};

}  // namespace tessera
