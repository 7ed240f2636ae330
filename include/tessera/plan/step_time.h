#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <tessera/plan/machine_speed.h>
#include <tessera/plan/run_record.h>

namespace tessera {

// Where something happens, one thing at a time.
enum class Lane : uint8_t { kCompute, kWithinHost, kBetweenHosts };
inline constexpr size_t kLanes = 3;
const char* name_of(Lane lane);  // for tables and pages: "compute"

// Seconds from the beginning of the step; what began in the step before has a negative beginning.
struct TimedInterval {
  std::string name;  // "aten::addmm", "all-gather of unit 'blocks.3'"
  Lane lane = Lane::kCompute;
  double begin_s = 0;
  double end_s = 0;
  std::string unit;  // of an operator: RecordedOperator::unit by name; "" outside of units
  bool in_backward = false;
};

// A step as one rank goes through it.
struct StepTime {
  double total_s = 0;          // from the end of the step before to its own
  double compute_s = 0;        // in operators, slowed down by what is communicated meanwhile
  double exposed_s = 0;        // in which compute waits for collectives: total_s - compute_s
  double communication_s = 0;  // of the step's collectives, one after the other
  double processor_s = 0;      // with MachineSpeed::cores: what this rank's thread has of a core; else compute_s
  std::vector<TimedInterval> intervals;  // by beginning within each lane; a two-level collective is in two lanes
};

// What a step of a recorded run would take on such a machine: a small simulation in the order in which this rank called
// operators, started collectives and waited for them. Operators follow each other; a collective begins when it is
// started and its lanes are free, in the order of starts; a wait holds compute until it is over. What overlaps follows
// from that order alone. Collectives of earlier steps (not the constructor's) go on into the step. All ranks are taken
// to be equally fast, and the host always to be ahead of the device.
//
// `step` is one of the record's, from 1; 0: the last. Throws std::invalid_argument for another one, and where the speed
// lacks something that the record needs.
//
// With MachineSpeed::cores all ranks of a host are simulated, which take turns on them: shared_cores.h.
StepTime predict_step(const RunRecord& record, const MachineSpeed& speed, int step = 0);
// The same of the first rank, where `of_ranks` are the records of the ranks of a host, in order: with
// MachineSpeed::cores those that have more to do hold back the others. Throws likewise, and for no record.
StepTime predict_step(const std::vector<RunRecord>& of_ranks, const MachineSpeed& speed, int step = 0);

}  // namespace tessera
