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

// What a choice takes on one rank: two steps of AdamW with clipping by norm.
struct PlannedTraining {
  TrainingChoice choice;
  std::string options;           // options_text()
  int rank = 0;                  // the one that takes most: rank 0, or whoever owns most parameters in stages 1 and 2
  BytesByKind peak;              // of its device
  int64_t host_bytes = 0;        // with offload: of the rank in host memory, at most
  int64_t collective_bytes = 0;  // of a step, by full tensors
  int64_t between_bytes = 0;     // what of it goes from host to host
  int64_t flop = 0;              // of a step, with what is computed again
  int64_t tokens = 0;            // of a step, of all ranks
  // Of a step, without intervals, where the machines' speed is known. Not with offload: the host's Adam and the copies
  // are no operators, so nobody would see them.
  std::optional<StepTime> time;
  std::string why_not;  // what libtorch says, if the model cannot be run so (in bfloat16, say)
};

// Where a model is trained. Ranks 0 to ranks_per_host - 1 are on the first host, and so on, for bytes as for times.
struct Machines {
  int ranks = 1;
  int ranks_per_host = 8;
  int64_t memory_bytes = 0;             // of each rank's device
  const MachineSpeed* speed = nullptr;  // null: unknown; its own ranks_per_host does not count
  int64_t host_memory_bytes = 0;        // of each host, for offload; 0: not known

  // With fewer ranks than that in all, all of them.
  int ranks_on_host() const { return std::min(ranks, ranks_per_host); }
  // Of those whose speed is that of CPUs, as DryRunOptions has it.
  int ranks_sharing_memory() const { return speed != nullptr && speed->cores > 0 ? ranks_per_host : 1; }
};

// A dry run of the choice. Throws as PlannedModel::run(), but for errors of libtorch's, and as predict_step().
PlannedTraining plan_training(const PlannedModel& model, const TrainingChoice& choice, const Machines& machines);

// PlannedTraining::time of a record of the choice, with its intervals. Throws as predict_step().
std::optional<StepTime> planned_time(const RunRecord& record, const TrainingChoice& choice, const Machines& machines);

// Of those of which the peak is at most kUsable of the device's memory and, with offload, what all ranks of a host have
// there of the host's, where that is known: one without offload, then the fastest where times are known, then the one
// that computes least again, then exchanges least between hosts, then at all, then is most as by default, then takes
// least; -1 if none. The rest of a GPU's memory is for its allocator, the kernels' scratch and the driver, which a dry
// run does not see.
inline constexpr double kUsable = 0.9;
// An index of `plans`.
int recommended(const std::vector<PlannedTraining>& plans, const Machines& machines);

// Their indices, the recommended one first and those that do not fit last, by what they take.
std::vector<int> by_preference(const std::vector<PlannedTraining>& plans, const Machines& machines);
// A table of what each takes, the milliseconds of a step and tokens a second where they are known, which fit, the
// recommended one and its options, and what is not known of it.
std::string plan_text(const std::vector<PlannedTraining>& plans, const Machines& machines);

// "80GiB", "24GB", "512MiB", or a number of bytes. Throws std::invalid_argument.
int64_t bytes_of_text(const std::string& text);

}  // namespace tessera
