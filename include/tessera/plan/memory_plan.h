#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <tessera/plan/planned_model.h>
#include <tessera/plan/run_record.h>
#include <tessera/plan/step_time.h>
#include <tessera/plan/training_choice.h>

namespace tessera {

// Predicted memory, work and time of training with a choice on one rank, by AdamW with clipping by norm.
struct PlannedTraining {
  TrainingChoice choice;
  std::string options;  // source text of the options: options_text()
  // The rank that needs the most memory: in stages 1 and 2, the owner of the most parameter bytes; otherwise rank 0.
  int rank = 0;
  BytesByKind peak;              // peak memory on the device of `rank`
  int64_t host_bytes = 0;        // with offload: the rank's maximum in host memory
  int64_t copies_bytes = 0;      // host memory for the copies of an elastic run: copies_bytes()
  int64_t collective_bytes = 0;  // bytes of the full tensors in a step's collectives
  int64_t between_bytes = 0;     // the part of collective_bytes that crosses hosts
  int64_t flop = 0;              // FLOP of a step, with recomputation
  int64_t tokens = 0;            // tokens of a step, on all ranks
  // The time of a step, without intervals. Empty if the machines' speed is unknown. Empty with offload, because the
  // record has no operators for the host's Adam and the copies.
  std::optional<StepTime> time;
  std::string why_not;  // libtorch's error if the model cannot run this way (in bfloat16, for example)
};

// The machines for the training. Ranks 0 to ranks_per_host - 1 are on the first host, the next ranks_per_host ranks on
// the second, and so on. Predictions of bytes and of times assume this.
struct Machines {
  int ranks = 1;
  int ranks_per_host = 8;
  int64_t memory_bytes = 0;             // memory of each rank's device
  const MachineSpeed* speed = nullptr;  // null: unknown; `speed->ranks_per_host` is ignored
  int64_t host_memory_bytes = 0;        // memory of each host, for offload and copies; 0: unknown
  std::optional<int> copies = {};       // ElasticOptions::copies; empty: the run is not elastic

  int ranks_on_host() const { return std::min(ranks, ranks_per_host); }  // ranks on the first host
  // Returns DryRunOptions::ranks_sharing_memory: ranks_per_host if the speed is that of CPUs, otherwise 1.
  int ranks_sharing_memory() const { return speed != nullptr && speed->cores > 0 ? ranks_per_host : 1; }
};

// Predicts ElasticRun::copied_bytes() between two copies. Memory then holds two steps of this rank's part and of
// `copies` other parts. After a loss of ranks, it holds up to three steps of larger parts. `record` must use AdamW.
// Throws std::invalid_argument for negative copies, and for fewer ranks than a copy of the model needs.
int64_t copies_bytes(const RunRecord& record, const TrainingChoice& choice, int ranks, int copies);

// Makes a dry run of the choice. Throws like model.run() and predict_step(), but stores libtorch's errors in `why_not`.
PlannedTraining plan_training(const PlannedModel& model, const TrainingChoice& choice, const Machines& machines);

// Returns PlannedTraining::time for a record of the choice, with intervals. Throws like predict_step().
std::optional<StepTime> planned_time(const RunRecord& record, const TrainingChoice& choice, const Machines& machines);

// The usable share of a device's or a host's memory. The rest is for memory that a dry run does not count: the GPU's
// allocator, scratch memory of kernels, and the driver.
inline constexpr double kUsable = 0.9;
// Returns the index of the recommended plan, or -1 if no plan fits. A plan's peak must be at most kUsable of the
// device's memory. With offload or copies, a host's ranks must also fit in that share of the host's memory, if known.
// Prefers, in this order: no offload, the shortest time if known, the least recomputation, the least traffic between
// hosts, the least traffic, the fewest options that are not defaults, the least memory.
int recommended(const std::vector<PlannedTraining>& plans, const Machines& machines);

// Returns the plans' indices: first of plans that fit, in order of preference; then of plans that do not fit, by
// memory; last of plans that cannot run.
std::vector<int> by_preference(const std::vector<PlannedTraining>& plans, const Machines& machines);
// Returns a table with each plan's memory, milliseconds of a step and tokens a second (if known), and whether the plan
// fits. Marks the recommended plan. Below the table are the unknown values, and the options of the recommended plan.
std::string plan_text(const std::vector<PlannedTraining>& plans, const Machines& machines);

// Parses "80GiB", "24GB", "512MiB", or a number of bytes, a million or more. Throws std::invalid_argument for any other
// text.
int64_t bytes_of_text(const std::string& text);

}  // namespace tessera
