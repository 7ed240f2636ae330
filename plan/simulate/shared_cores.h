#pragma once

#include <vector>

#include <tessera/plan/machine_speed.h>
#include <tessera/plan/run_record.h>
#include <tessera/plan/step_time.h>

namespace tessera::internal {

// Implements predict_step() if MachineSpeed::cores is set: a discrete-event simulation of all ranks of a host, with the
// scheduler of core_turns.h and the messages of collective_flow.h. A rank computes, copies and adds up on a core, and
// releases it while it waits. Within a host, the second of two ranks to arrive copies their message, and sums are added
// up in waits, so compute and communication do not overlap. Between hosts a thread of each rank sends and receives; it
// shares the cores, and the link in either direction. All hosts are assumed to be alike. Operators' times vary by
// MachineSpeed::jitter, with a fixed seed. Returns the mean of several repeats of the step.
//
// `records`: by rank of the host, or one for all. `step`: of the records, from 1. Throws std::invalid_argument for
// another number of records, records of different trainings, more than 256 ranks on a host, and speeds missing for the
// records.
StepTime predict_on_cores(const std::vector<const RunRecord*>& records, const MachineSpeed& speed, int step);

}  // namespace tessera::internal
