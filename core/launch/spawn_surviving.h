#pragma once

#include <chrono>

namespace tessera::internal {

// spawn_local(), whose ranks go on when others fail, while at least `least_ranks` run or have ended without error.
// Returns 0 in the end if so.
int spawn_surviving(int world, int argc, char** argv, std::chrono::milliseconds grace, int least_ranks);

}  // namespace tessera::internal
