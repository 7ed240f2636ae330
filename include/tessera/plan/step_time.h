#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <tessera/plan/machine_speed.h>
#include <tessera/plan/run_record.h>

namespace tessera {

// A resource that runs one operator or collective at a time.
enum class Lane : uint8_t { kCompute, kWithinHost, kBetweenHosts };
inline constexpr size_t kLanes = 3;
const char* name_of(Lane lane);  // the name in tables and pages: "compute"

// A predicted span, in seconds from the start of the step. begin_s < 0: the span begins in the previous step.
struct TimedInterval {
  std::string name;  // "aten::addmm", "all-gather of unit 'blocks.3'"
  Lane lane = Lane::kCompute;
  double begin_s = 0;
  double end_s = 0;
  std::string unit;  // for operators: the unit's name; "" outside units
  bool in_backward = false;
};

// The predicted step of one rank.
struct StepTime {
  double total_s = 0;                    // from the end of the previous step to the end of this one
  double compute_s = 0;                  // time in operators, slowed by concurrent communication
  double exposed_s = 0;                  // time in which collectives block compute: total_s - compute_s
  double communication_s = 0;            // sum of the times of the step's collectives
  double processor_s = 0;                // with MachineSpeed::cores: time on a core; otherwise compute_s
  std::vector<TimedInterval> intervals;  // in each lane sorted by begin_s; a two-level collective is in two lanes
};

// Predicts the time of a recorded step on a machine. Simulates this rank's operators, starts of collectives, and waits,
// in their recorded order. Operators run in sequence. Collectives begin in the order of their starts, each as soon as
// its lanes are free. A wait blocks compute until the collective completes. Collectives that are still in flight at the
// start of the step continue, except those of the constructor. Assumes that all ranks are equally fast, and that the
// host is always ahead of the device.
//
// `step`: number of the step in the record, from 1; 0: the last step. Throws std::invalid_argument for any other step,
// and if `speed` lacks a speed that the record needs.
//
// If MachineSpeed::cores is set, simulates all ranks of a host, because they share the cores. See shared_cores.h.
StepTime predict_step(const RunRecord& record, const MachineSpeed& speed, int step = 0);
// Like the function above, for the first rank of a host. `of_ranks` has the records of the host's ranks, in rank order.
// With MachineSpeed::cores, ranks with more work delay the others. Also throws std::invalid_argument if `of_ranks` is
// empty.
StepTime predict_step(const std::vector<RunRecord>& of_ranks, const MachineSpeed& speed, int step = 0);

}  // namespace tessera
