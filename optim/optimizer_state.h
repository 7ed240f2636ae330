#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace tessera {

// What an optimizer keeps for one parameter, by name: {"exp_avg", ...}, {"step", 7}. Tensors have
// the parameter's shape; undefined ones are left out. They are the optimizer's own, not copies.
struct ParameterState {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  std::vector<std::pair<std::string, int64_t>> numbers;
};

// A group's hyper-parameters by name: {"lr", 1e-3}, {"beta1", 0.9}, {"amsgrad", false}.
using OptimizerOption = std::variant<bool, double>;
using OptionList = std::vector<std::pair<std::string, OptimizerOption>>;

// All of these know the optimizers that keep torch's Adam, AdamW, SGD, RMSprop or Adagrad options
// and states (torch's own five and Tessera's), since libtorch's archives do not tell names apart
// from values. They throw std::invalid_argument for others.

// "Adam", "AdamW", "SGD", "RMSprop" or "Adagrad": which options and states the optimizer keeps.
std::string optimizer_kind(const torch::optim::Optimizer& optimizer);

ParameterState read_state(const torch::optim::OptimizerParamState& state);

// A state for an optimizer of this kind with the given values. Throws std::invalid_argument, which
// lists the names, for a value that the kind does not have or one of its numbers missing.
std::unique_ptr<torch::optim::OptimizerParamState> make_state(const std::string& kind, const ParameterState& values);

OptionList read_options(const torch::optim::OptimizerOptions& options);

// Sets the named options and leaves the others. Throws as make_state(), with nothing changed.
void write_options(torch::optim::OptimizerOptions& options, const OptionList& values);

}  // namespace tessera
