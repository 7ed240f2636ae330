#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace tessera::internal {

// A weight that only at::linear uses, of a module that is not a torch::nn::Linear.
struct LinearWeight {
  torch::nn::Module* owner;
  std::string fqn;   // of the parameter
  std::string name;  // its name in the owner
  // The module's computation reads this tensor, so replacing it replaces the weight.
  at::Tensor* used;
};
class HasLinearWeights {
 public:
  virtual ~HasLinearWeights() = default;
  // Names are relative to this module. `used` is valid as long as the module exists.
  virtual std::vector<LinearWeight> linear_weights() = 0;
};

}  // namespace tessera::internal
