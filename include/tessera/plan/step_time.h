#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <tessera/plan/machine_speed.h>
#include <tessera/plan/run_record.h>

namespace tessera {

// A resource that does one thing at a time.
enum class Lane : uint8_t { kCompute, kWithinHost, kBetweenHosts };
inline constexpr size_t kLanes = 3;
const char* name_of(Lane lane);  // in tables and pages: "compute"

// Seconds from the start of the step; negative for a begin in the previous step.
struct TimedInterval {
  std::string name;  // "aten::addmm", "all-gather of unit 'blocks.3'"
  Lane lane = Lane::kCompute;
  double begin_s = 0;
  double end_s = 0;
  std::string unit;  // of an operator: the name of RecordedOperator::unit; "" outside units
  bool in_backward = false;
};

// The predicted step of one rank.
struct StepTime {
  double total_s = 0;                    // from the end of the previous step to its own
  double compute_s = 0;                  // in operators, with the slowdown by concurrent communication
  double exposed_s = 0;                  // compute is blocked by collectives: total_s - compute_s
  double communication_s = 0;            // sum over the step's collectives
  double processor_s = 0;                // with MachineSpeed::cores: this rank's time on a core; otherwise compute_s
  std::vector<TimedInterval> intervals;  // by begin in each lane; a two-level collective is in two lanes
};

// Predicts the time of a recorded step on a machine, by a simulation in this rank's order of operators, starts and
// waits. Operators run in sequence. A collective begins when it is started and its lanes are free, in the order of
// starts; a wait blocks compute until it completes. That order alone determines the overlap. Collectives of earlier
// steps, except the constructor's, continue into the step. Assumes that all ranks are equally fast, and that the host
// is always ahead of the device.
//
// `step`: of the record, from 1; 0: the last. Throws std::invalid_argument for any other step, and for speeds missing
// for the record.
//
// With MachineSpeed::cores, simulates all ranks of a host, which share the cores: shared_cores.h.
StepTime predict_step(const RunRecord& record, const MachineSpeed& speed, int step = 0);
// As above, for the first rank of a host, from the records of all its ranks in rank order. With MachineSpeed::cores,
// ranks with more work delay the others. Also throws without records.
StepTime predict_step(const std::vector<RunRecord>& of_ranks, const MachineSpeed& speed, int step = 0);

}  // namespace tessera
