#pragma once

#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <string>
#include <string_view>
#include <vector>

#include <tessera/communicator.h>
#include "core/layout/unit_plan.h"

namespace tessera::internal {

// tensors <- rank 0's. Small ones of one dtype travel together, large ones as they are; any dtype,
// any strides, any device: what is not on the communicator's travels by way of it. Collective; the same list of shapes
// on all ranks. Not recorded by autograd.
void broadcast_tensors(const std::vector<at::Tensor>& tensors, Communicator& comm, std::string_view what);

// The module's parameters, each once, in order of registration.
std::vector<PlannedParameter> registered_parameters(const torch::nn::Module& module);

// The same by their first names.
torch::OrderedDict<std::string, at::Tensor> parameters_by_name(const torch::nn::Module& module);

// Throws std::invalid_argument, naming it by `label`, for a tensor that has no strides (a sparse one).
void require_strided(const std::string& label, const at::Tensor& tensor);

// A line for each parameter and buffer that says what all ranks must have alike: name, dtype,
// shape, layout in memory, frozen or not, kept in full precision or not, ties. For require_agreement(). Throws
// as require_strided() for a buffer.
std::vector<std::string> describe_parameters(const std::vector<PlannedParameter>& parameters);
std::vector<std::string> describe_buffers(const torch::nn::Module& module);

}  // namespace tessera::internal
