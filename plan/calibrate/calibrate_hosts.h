#pragma once

#include <memory>

#include <tessera/communicator.h>
#include <tessera/plan/machine_speed.h>
#include "plan/calibrate/calibrate.h"

namespace tessera::internal {

// Measures what lies between the ranks of `comm`, each of which is alone on its host: MachineSpeed::between_hosts, and
// of tcp, which calibrate() has measured within one machine, what a byte takes of a rank's processors: what its process
// has had, or what matrix products are slower meanwhile, if that is more, since the kernel's own work on packets is in
// no process' time. `speed` is the machine's, as calibrate() gives it; only rank 0's counts, and what is returned is
// the same on all ranks. Collective, on the CPU, some 10 s. Throws std::invalid_argument for a group of one, for a
// machine without tcp, and for options that calibrate() refuses, and CommError. Sets the process's number of
// intra-operator threads.
MachineSpeed calibrate_hosts(MachineSpeed speed, const std::shared_ptr<Communicator>& comm,
                             const CalibrationOptions& options);

}  // namespace tessera::internal
