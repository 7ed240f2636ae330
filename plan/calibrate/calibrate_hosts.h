#pragma once

#include <memory>

#include <tessera/communicator.h>
#include <tessera/plan/machine_speed.h>
#include "plan/calibrate/calibrate.h"

namespace tessera::internal {

// Measures MachineSpeed::between_hosts, and the processor time of a byte in `tcp`. Each rank of `comm` must be alone on
// its host. The processor time is the larger of the process's own time and the slowdown of concurrent matrix products.
// Both are needed, because Linux charges the work on network packets to no process. `speed` must be a result of
// calibrate(). Uses rank 0's `tcp`. Returns `speed` with the two measured fields, which are equal on all ranks.
//
// Collective. Takes about 10 s. Throws std::invalid_argument for a group of one rank, a speed without `tcp`, or fewer
// than 1 thread. Throws CommError if a collective fails. Sets the process's number of intra-operator threads.
MachineSpeed calibrate_hosts(MachineSpeed speed, const std::shared_ptr<Communicator>& comm,
                             const CalibrationOptions& options);

}  // namespace tessera::internal
