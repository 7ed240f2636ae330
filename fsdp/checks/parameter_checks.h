#pragma once

#include <string>

#include "fsdp/unit.h"

namespace tessera::internal {

// Finds parameters of the unit that were given other data since the last call (torch::load(), set_data(),
// vector_to_parameters()): takes this rank's part of the values, and makes the tensors views again. Throws
// std::logic_error, naming the parameter, for data of another shape or dtype (module.to()), if `may_change` is false,
// and for shards that were given other data.
void reattach(Unit& unit, bool may_change);

// Before `operation` writes to `view`, a view of a read-only page: throws std::logic_error, naming the parameter,
// unless the operation leaves the page alone. `rank` is for errors.
void require_write(const Unit& unit, const Page& page, const at::Tensor& view, const std::string& operation,
                   const std::string& rank);

// Of an unsharded unit: throws std::logic_error for a page that its parameters are not views of now: the user has kept
// a view from before or after summon_full_params(). `rank` is for errors.
void require_attached(const Unit& unit, const Page& page, const std::string& rank);

}  // namespace tessera::internal
