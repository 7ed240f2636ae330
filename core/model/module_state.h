#pragma once

#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <string>
#include <string_view>
#include <vector>

#include <tessera/communicator.h>
#include "core/layout/unit_plan.h"

namespace tessera::internal {

// Copies rank 0's tensors to all ranks. The tensors may have any dtype, strides and device. Small tensors of one dtype
// share a message. Tensors on another device are copied through the communicator's device. Collective: shapes must be
// equal on all ranks. Autograd does not record the copies.
void broadcast_tensors(const std::vector<at::Tensor>& tensors, Communicator& comm, std::string_view what);

// Returns the module's parameters without duplicates, in registration order.
std::vector<PlannedParameter> registered_parameters(const torch::nn::Module& module);

// Returns the parameters by name. A tied parameter is listed under its first name.
torch::OrderedDict<std::string, at::Tensor> parameters_by_name(const torch::nn::Module& module);

// Return one line for each parameter (name, dtype, shape, memory layout, frozen, full precision, ties) or buffer (name,
// dtype, shape, expanded dimensions), for require_agreement(). describe_buffers() throws like require_strided().
std::vector<std::string> describe_parameters(const std::vector<PlannedParameter>& parameters);
std::vector<std::string> describe_buffers(const torch::nn::Module& module);

// Whether `grad` is defined and not a placeholder. In a wrapper's constructor, it is then a gradient of the user.
bool is_earlier_gradient(const at::Tensor& grad);
// Returns a line with a checksum for each earlier gradient. If different earlier gradients would make the ranks of a
// wrapper diverge, the wrapper compares these lines over the ranks.
std::vector<std::string> describe_earlier_gradients(const std::vector<PlannedParameter>& parameters);

}  // namespace tessera::internal
