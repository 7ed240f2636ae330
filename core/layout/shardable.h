#pragma once

#include <ATen/core/Tensor.h>

#include <torch/ordered_dict.h>

#include <string>
#include <vector>

#include <tessera/communicator.h>
#include "core/layout/unit_plan.h"

namespace tessera::internal {

// What every wrapper asks of the parameters that it is given. `who` is its name, for errors.
//
// Throws std::invalid_argument, naming parameter and rank, for one that is no leaf, not dense, not on the
// communicator's device, sharded already (by this or another wrapper), trained though it is expanded (several elements
// are one in memory), or that shares memory with another without being the same tensor: ties are kept between names of
// one tensor only. Deferred parameters pass if `may_be_deferred`.
void require_shardable(const std::vector<PlannedParameter>& parameters, const Communicator& comm,
                       const std::string& who, bool may_be_deferred = false);

// For a wrapper that gives parameters other memory. Throws std::invalid_argument, naming both and the rank, for one of
// `others`, tensors that keep theirs, that shares memory with a parameter: it would be torn from it. `kind` is what
// they are, for errors: "buffer".
void require_apart(const torch::OrderedDict<std::string, at::Tensor>& others, const std::string& kind,
                   const std::vector<PlannedParameter>& parameters, const std::string& who, int rank);

}  // namespace tessera::internal
