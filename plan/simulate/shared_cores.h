#pragma once

#include <vector>

#include <tessera/plan/machine_speed.h>
#include <tessera/plan/run_record.h>
#include <tessera/plan/step_time.h>

namespace tessera::internal {

// Implements predict_step() if MachineSpeed::cores is set. Simulates all ranks of a host as discrete events, with the
// scheduler of core_turns.h and the messages of collective_flow.h. A rank occupies a core while it computes, copies or
// adds up, and releases the core while it waits. Within a host, compute and communication do not overlap: the second of
// two ranks to arrive copies their message, and waits add up sums. Between hosts, a second thread of each rank sends
// and receives. It competes for the cores, and for the link in each direction. All hosts are assumed to be alike. Times
// of operators vary by MachineSpeed::jitter, with a fixed seed. Returns the mean of several repeats of the step.
//
// `records`: one for each rank of the host, or one for all ranks. `step`: number of a recorded step, from 1. Throws
// std::invalid_argument for another number of records, records of different trainings, more than 256 ranks on a host,
// and speeds that the records need but `speed` lacks.
StepTime predict_on_cores(const std::vector<const RunRecord*>& records, const MachineSpeed& speed, int step);

}  // namespace tessera::internal
