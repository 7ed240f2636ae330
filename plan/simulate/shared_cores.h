#pragma once

#include <vector>

#include <tessera/plan/machine_speed.h>
#include <tessera/plan/run_record.h>
#include <tessera/plan/step_time.h>

namespace tessera::internal {

// Implements predict_step() if MachineSpeed::cores is set. Runs a discrete-event simulation of a host's ranks, with
// the scheduler of core_turns.h and the messages of collective_flow.h. A rank uses a core while it computes, copies or
// sums data, and no core while it waits. Within a host, compute and communication do not overlap. Of two ranks, the
// later one copies the message between them. A wait sums received data. Between hosts, a second thread of each rank
// sends messages, and competes for the cores and for the link. All hosts are assumed to behave alike. Operator times
// vary by MachineSpeed::jitter, with a fixed seed. Returns the mean of several repeats of the step.
//
// `records` has one record for each rank of the host, or one for all ranks. `step` is the number of a recorded step,
// from 1. Throws std::invalid_argument for another number of records, records of different trainings, or more than 256
// ranks on a host. Also throws if `speed` lacks a speed that the records need.
StepTime predict_on_cores(const std::vector<const RunRecord*>& records, const MachineSpeed& speed, int step);

}  // namespace tessera::internal
