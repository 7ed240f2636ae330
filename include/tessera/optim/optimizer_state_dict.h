#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace tessera {

// One hyper-parameter, and a group's hyper-parameters by name: {"lr", 1e-3}, {"beta1", 0.9}, {"amsgrad", false}.
using OptimizerOption = std::variant<bool, double>;
using OptionList = std::vector<std::pair<std::string, OptimizerOption>>;

// An optimizer's state, like Python's optimizer.state_dict(). The key of a parameter is its index in the concatenated
// parameter lists of all groups.
struct OptimizerStateDict {
  struct Group {
    OptionList options;
    int64_t parameter_count = 0;
  };
  // The state of one parameter, by name: {"exp_avg", ...}, {"step", 7}. Omits undefined tensors. local_state_dict() of
  // OSS returns the optimizer's own tensors; state_dict() of OSS returns copies.
  struct ParameterState {
    std::vector<std::pair<std::string, at::Tensor>> tensors;
    std::vector<std::pair<std::string, int64_t>> numbers;
  };
  std::string kind;  // the optimizer's class, such as "Adam"; see optimizer_kind()
  std::vector<Group> groups;
  std::map<int64_t, ParameterState> state;  // by parameter index; states are of whole parameters

  int64_t parameter_count() const;  // number of parameters in all groups
};

// The functions below support the options and states of torch's Adam, AdamW, SGD, RMSprop and Adagrad, and of Tessera's
// optimizers. For other classes, they throw std::invalid_argument.

// Returns a group's hyper-parameters by name: read_options(group.options()).
OptionList read_options(const torch::optim::OptimizerOptions& options);
// Sets only the named options. Throws std::invalid_argument, and changes nothing, for an unknown name or a wrong type.
void write_options(torch::optim::OptimizerOptions& options, const OptionList& values);
// Returns the state of one parameter, such as an element of optimizer.state(). The tensors are the optimizer's own.
OptimizerStateDict::ParameterState read_state(const torch::optim::OptimizerParamState& state);

}  // namespace tessera
