#pragma once

#include <memory>

#include <tessera/communicator.h>
#include <tessera/plan/machine_speed.h>
#include "plan/calibrate/calibrate.h"

namespace tessera::internal {

// Measures the link between the ranks of `comm`, each of which must be alone on its host: MachineSpeed::between_hosts,
// and the processor time of a byte in tcp. The latter is the larger of the process's time and the slowdown of
// concurrent matrix products, because the kernel's work on packets is charged to no process. `speed` is the result of
// calibrate(); only rank 0's is used, and the result is equal on all ranks.
//
// Collective; runs on the CPU for some 10 s. Throws std::invalid_argument for a group of one rank, a machine without
// tcp, and options that calibrate() refuses; also CommError. Sets the process's number of intra-operator threads.
MachineSpeed calibrate_hosts(MachineSpeed speed, const std::shared_ptr<Communicator>& comm,
                             const CalibrationOptions& options);

}  // namespace tessera::internal
