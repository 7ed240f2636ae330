#pragma once

#include <ATen/core/Tensor.h>

#include <torch/ordered_dict.h>

#include <string>
#include <vector>

#include <tessera/communicator.h>
#include "core/layout/unit_plan.h"

namespace tessera::internal {

// Throws std::invalid_argument with `label` for a tensor without strided values: undefined, sparse, nested, quantized,
// meta.
void require_strided(const std::string& label, const at::Tensor& tensor);

// Checks the parameters of a wrapper. `who` is the wrapper's name, for errors.
//
// Throws std::invalid_argument, naming parameter and rank, if a parameter is undefined, made in InferenceMode, not a
// leaf, not strided, not on the communicator's device, or sharded by a wrapper. Also throws if one shares memory with a
// different parameter tensor, or is trained but expanded (several elements share memory). A tensor may have several
// names, which stay tied. Deferred parameters pass if `may_be_deferred`; otherwise throws.
void require_shardable(const std::vector<PlannedParameter>& parameters, const Communicator& comm,
                       const std::string& who, bool may_be_deferred = false);

// Checks `others`: the tensors that keep their memory when a wrapper moves the parameters to new memory. `kind` names
// them in errors ("buffer"). Throws std::invalid_argument, naming both tensors and the rank, if one of `others` shares
// memory with a parameter.
void require_apart(const torch::OrderedDict<std::string, at::Tensor>& others, const std::string& kind,
                   const std::vector<PlannedParameter>& parameters, const std::string& who, int rank);

}  // namespace tessera::internal
