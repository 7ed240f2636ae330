#pragma once

#include "fsdp/flat_parameter.h"

namespace tessera::internal {

// Makes this rank's part of gradients that the parameters have had since before they were wrapped the `.grad` of their
// shards, and clears the parameters' own. Not collective: require_same_plan() has compared them over the ranks.
void take_earlier_gradients(FlatParameter& flat);

}  // namespace tessera::internal
