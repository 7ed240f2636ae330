#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace tessera::internal {

// A parameter that is used only as the weight of at::linear, in a module that is not a torch::nn::Linear.
struct LinearWeight {
  torch::nn::Module* owner;
  std::string fqn;   // dotted name of the parameter
  std::string name;  // name of the parameter in `owner`
  // The tensor that the module reads in its computation. Assigning another tensor to `*used` replaces the weight.
  at::Tensor* used;
};
class HasLinearWeights {
 public:
  virtual ~HasLinearWeights() = default;
  // Returns the weights, with names relative to this module. `used` stays valid as long as the module exists.
  virtual std::vector<LinearWeight> linear_weights() = 0;
};

}  // namespace tessera::internal
