#pragma once

#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <string>
#include <string_view>
#include <vector>

#include <tessera/communicator.h>
#include "core/layout/unit_plan.h"

namespace tessera::internal {

// Copies rank 0's tensors to all ranks, of any dtype, strides and device. Small tensors of one dtype share a message.
// Tensors on other devices are copied through the communicator's device. Collective; shapes must be equal on all ranks.
// Not recorded by autograd.
void broadcast_tensors(const std::vector<at::Tensor>& tensors, Communicator& comm, std::string_view what);

// The module's parameters, each once, in registration order.
std::vector<PlannedParameter> registered_parameters(const torch::nn::Module& module);

// The parameters by their first names.
torch::OrderedDict<std::string, at::Tensor> parameters_by_name(const torch::nn::Module& module);

// Throws std::invalid_argument with `label` if a tensor has no strides (a sparse one).
void require_strided(const std::string& label, const at::Tensor& tensor);

// Describes each parameter and buffer in one line, for require_agreement(): name, dtype, shape, memory layout, frozen
// or not, kept in full precision or not, ties. Throws like require_strided() for a buffer.
std::vector<std::string> describe_parameters(const std::vector<PlannedParameter>& parameters);
std::vector<std::string> describe_buffers(const torch::nn::Module& module);

// Whether a parameter's `.grad` is a gradient from before wrapping. Wrappers keep such gradients.
bool is_earlier_gradient(const at::Tensor& grad);
// Describes earlier gradients by checksums, one line each. Each rank keeps its own gradients, so a wrapper compares
// them if unequal ones would make ranks diverge.
std::vector<std::string> describe_earlier_gradients(const std::vector<PlannedParameter>& parameters);

}  // namespace tessera::internal
