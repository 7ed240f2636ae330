#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <tessera/model/model_shards.h>
#include <tessera/optim/optimizer_state_dict.h>

namespace tessera::internal {

using ParameterState = OptimizerStateDict::ParameterState;

// The form of a state tensor, which its name determines. kElements: a value for each element, in the parameter's shape.
// kBlocks (suffix "_scale"): 1-D, a value for each block of 256 elements in memory order. kRows, kColumns (suffixes
// "_row", "_col"): 1-D, a value for each row or column of the last two dimensions. A rank that steps the parameter
// holds the whole tensor of form kRows or kColumns, even if the rank's shard is empty.
enum class StateForm { kElements, kBlocks, kRows, kColumns };
StateForm form_of_state(const std::string& name);
inline constexpr int64_t kStateBlockNumel = 256;

// Returns the dtype in which an optimizer of this kind keeps the averages of a parameter of `dtype`.
at::ScalarType dtype_of_averages(const std::string& kind, at::ScalarType dtype);

// Returns the shape of the state tensor `name` of a parameter of shape `sizes`. For kRows and kColumns, throws
// std::invalid_argument if `sizes` has fewer than 2 dimensions.
std::vector<int64_t> state_sizes(const std::string& name, const std::vector<int64_t>& sizes);

// Returns the part of the state tensor `name` for the shard `parameter`: for kElements, `parameter` itself; otherwise a
// shard with an empty `tensor`. If a shard boundary cuts a block, both shards hold the block's value.
NamedShard state_shard(const std::string& name, const NamedShard& parameter, const Communicator& comm);
// Returns the range of the state tensor `name` to save with the shard `parameter`. Of shards that share a block, only
// the one with the block's first element saves the block's value.
Range saved_part(const std::string& name, const NamedShard& parameter);

// The functions below support the same classes as read_options(). For other classes, all except complete_state() and
// text_of() throw std::invalid_argument.

// Returns the kind of the optimizer's options and states: "Adam", "AdamW", "Muon", ...
std::string optimizer_kind(const torch::optim::Optimizer& optimizer);

// Like read_state(state), but returns 8-bit states in the parameter's memory order. If set_data() has changed the
// strides since the last step, the returned states are copies.
ParameterState read_ordered_state(const torch::optim::OptimizerParamState& state, const at::Tensor& parameter);

// Creates a state of this kind with the given values. Throws std::invalid_argument, which lists the valid names, if the
// kind or a name is unknown, or if a number is missing.
std::unique_ptr<torch::optim::OptimizerParamState> make_state(const std::string& kind, const ParameterState& values);

// If a state of torch's Adam, AdamW or RMSprop lacks tensors that `options` require, adds them as zeros. This happens
// if the options were changed after the state was created. A no-op for other states.
void complete_state(torch::optim::OptimizerParamState& state, const torch::optim::OptimizerOptions& options);

// Return all digits of a value, or all options: "Lion: lr=0.001 ..." (for an unknown class, only its name).
std::string text_of(const OptimizerOption& option);
std::string text_of(const torch::optim::OptimizerOptions& options);

// Returns a state dictionary with the current groups and options, without states.
OptimizerStateDict describe_groups(const torch::optim::Optimizer& optimizer);

// Checks that the dictionary matches the optimizer: kind, groups, group lengths, and shapes of states.
// Throws std::invalid_argument that lists the mismatches.
void require_matching(const OptimizerStateDict& dict, const torch::optim::Optimizer& optimizer);

}  // namespace tessera::internal
