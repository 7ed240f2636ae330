#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera {

// An optimizer that can take a step for some of its parameters and leave the others for later.
class PartialStep {
 public:
  virtual ~PartialStep() = default;
  // What step() does, for those of `parameters` that have a gradient. Throws std::invalid_argument
  // for a tensor that is no parameter of the optimizer.
  virtual void step_parameters(const std::vector<at::Tensor>& parameters) = 0;
};

}  // namespace tessera
