#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <tessera/model_shards.h>
#include <tessera/optimizer_state_dict.h>

namespace tessera::internal {

// How a state's tensor belongs to its parameter, by its name: element by element, in the parameter's shape; or, 1-D, a
// number for each block of 256 elements in the order of memory (names that end in "_scale"), or for each row or column
// of the last two dimensions ("_row", "_col"), which every rank that has a part of the parameter has all of.
enum class StateForm { kElements, kBlocks, kRows, kColumns };
StateForm form_of_state(const std::string& name);
inline constexpr int64_t kStateBlockNumel = 256;

// The shape of a state's tensor for a parameter of `sizes`.
std::vector<int64_t> state_sizes(const std::string& name, const std::vector<int64_t>& sizes);

// The part of a state's tensor that goes with a part of the parameter; `tensor` is an empty one, but for kElements. Of
// blocks that begin or end in another part, both have all.
NamedShard state_shard(const std::string& name, const NamedShard& parameter, const Communicator& comm);
// What of it is this part's to save: each block once, where its first element is.
Range saved_part(const std::string& name, const NamedShard& parameter);

// All of these know the optimizers that keep torch's Adam, AdamW, SGD, RMSprop or Adagrad options and states, and
// Tessera's own, and throw std::invalid_argument for others: libtorch's archives do not tell names from values.

// "Adam", "AdamW", "Muon", ...: which options and states the optimizer keeps.
std::string optimizer_kind(const torch::optim::Optimizer& optimizer);

ParameterState read_state(const torch::optim::OptimizerParamState& state);
// The same for who keeps it beside the parameter: blocks in the order of its memory now, copies where set_data() has
// given it other strides since the last step.
ParameterState read_state(const torch::optim::OptimizerParamState& state, const at::Tensor& parameter);

// A state for an optimizer of this kind with the given values. Throws std::invalid_argument, which
// lists the names, for a value that the kind does not have or one of its numbers missing.
std::unique_ptr<torch::optim::OptimizerParamState> make_state(const std::string& kind, const ParameterState& values);

// What torch's Adam, AdamW or RMSprop need of a state under these options, and it does not have since it was made under
// others: zeros.
void complete_state(torch::optim::OptimizerParamState& state, const torch::optim::OptimizerOptions& options);

OptionList read_options(const torch::optim::OptimizerOptions& options);
// An option as it is, with all its digits; and all of them, "Lion: lr=0.001 weight_decay=0".
std::string text_of(const OptimizerOption& option);
std::string text_of(const torch::optim::OptimizerOptions& options);

// Sets the named options and leaves the others. Throws as make_state(), with nothing changed.
void write_options(torch::optim::OptimizerOptions& options, const OptionList& values);

// The dictionary without states: groups and options as they are now.
OptimizerStateDict describe_groups(const torch::optim::Optimizer& optimizer);

// Checks that the dictionary fits the optimizer: kind, groups, their lengths, and the states' shapes.
// Throws std::invalid_argument that lists everything that does not.
void require_matching(const OptimizerStateDict& dict, const torch::optim::Optimizer& optimizer);

}  // namespace tessera::internal
