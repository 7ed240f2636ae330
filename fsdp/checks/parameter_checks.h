#pragma once

#include <string>

#include "fsdp/sharded_model.h"

namespace tessera::internal {

// Finds parameters whose data the user replaced since the last call (torch::load(), set_data()). Copies this rank's
// part of the new values (if summoned, all values), and makes the parameter a view of its page again. Throws
// std::logic_error, naming the parameter, if the new data have another shape or dtype or are another parameter's, if
// `may_change` is false, or if the user replaced a shard's data.
void reattach(Unit& unit, bool may_change);

// Must be called before `operation` writes to `view`, a view of a read-only page. Throws std::logic_error, unless the
// operation is set_() on a module's parameter: set_() does not write to the page. `rank` is for errors.
void require_write(const Unit& unit, const Page& page, const at::Tensor& view, const std::string& operation,
                   const std::string& rank);

// Must be called after the unit was unsharded. Throws std::logic_error if the page is not attached. In that case the
// user kept a view from outside summon_full_params() and used it inside, or the reverse. `rank` is for errors.
void require_attached(const Unit& unit, const Page& page, const std::string& rank);

}  // namespace tessera::internal
