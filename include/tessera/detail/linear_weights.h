#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace tessera::internal {

// A weight that only at::linear uses, where it is not a torch::nn::Linear's: of a module that computes in another way.
struct LinearWeight {
  torch::nn::Module* owner;
  std::string fqn;   // of the parameter
  std::string name;  // its name in the owner
  // What computes reads this tensor and no other.
  at::Tensor* used;
};
class HasLinearWeights {
 public:
  virtual ~HasLinearWeights() = default;
  // Names are from this module on; `used` stays where it is as long as the module lives.
  virtual std::vector<LinearWeight> linear_weights() = 0;
};

}  // namespace tessera::internal
