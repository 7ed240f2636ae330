#pragma once

#include <vector>

#include <tessera/plan/machine_speed.h>
#include <tessera/plan/run_record.h>
#include <tessera/plan/step_time.h>

namespace tessera::internal {

// predict_step() where MachineSpeed::cores says how many cores the ranks of a host share: a discrete-event run of all
// of them, as operating system (core_turns.h) and transports (collective_flow.h) have it. A rank computes, copies and
// adds up on a core, and gives it back where it waits. Within a host a message is copied by whichever of two ranks
// comes to it second, and sums are taken when they are waited for, so nothing goes on beside compute; between hosts
// each rank's messages have a thread of their own, which takes turns with the ranks, and the link, in either direction.
// Other hosts are taken to do as this one does. Operators' times vary by MachineSpeed::jitter, in the same way in every
// call. The step is repeated a few times, in the mean.
//
// records: by rank of the host, or one for all of them. step: one of the records', from 1. Throws std::invalid_argument
// for another number of records, for such of several trainings, for more than 256 ranks on a host, and where the speed
// lacks something that the records need.
StepTime predict_on_cores(const std::vector<const RunRecord*>& records, const MachineSpeed& speed, int step);

}  // namespace tessera::internal
