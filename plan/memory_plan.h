#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/plan/planned_model.h"
#include "tessera/plan/run_record.h"
#include "tessera/plan/step_time.h"
#include "tessera/plan/training_choice.h"

namespace tessera {

// What a choice takes on one rank: two steps of AdamW with clipping by norm.
struct PlannedTraining {
  TrainingChoice choice;
  std::string options;           // options_text()
  BytesByKind peak;              // of rank 0 on its device
  int64_t host_bytes = 0;        // with offload: of rank 0 in host memory, at most
  int64_t collective_bytes = 0;  // of a step, by full tensors
  int64_t between_bytes = 0;     // what of it goes from host to host
  int64_t flop = 0;              // of a step, with what is computed again
  int64_t tokens = 0;            // of a step, of all ranks
  std::optional<StepTime> time;  // of a step, without intervals, where the machines' speed is known
  std::string why_not;           // what libtorch says, if the model cannot be run so (in bfloat16, say)
};

// Where a model is trained.
struct Machines {
  int ranks = 1;
  int ranks_per_host = 8;
  int64_t memory_bytes = 0;             // of each rank's device
  const MachineSpeed* speed = nullptr;  // null: unknown
};

// A dry run of the choice. Throws as PlannedModel::run(), but for errors of libtorch's, and as predict_step().
PlannedTraining plan_training(const PlannedModel& model, const TrainingChoice& choice, const Machines& machines);

// Of those of which the peak is at most kUsable of `memory_bytes`: one without offload, then the fastest where times
// are known, then the one that computes least again, then exchanges least between hosts, then at all, then is most as
// by default, then takes least; -1 if none. The rest of a GPU's memory is for its allocator, the kernels' scratch and
// the driver, which a dry run does not see.
inline constexpr double kUsable = 0.9;
// An index of `plans`.
int recommended(const std::vector<PlannedTraining>& plans, int64_t memory_bytes);

// Their indices, the recommended one first and those that do not fit last, by what they take.
std::vector<int> by_preference(const std::vector<PlannedTraining>& plans, int64_t memory_bytes);
// A table of what each takes, the milliseconds of a step and tokens a second where they are known, which fit, the
// recommended one and its options.
std::string plan_text(const std::vector<PlannedTraining>& plans, const Machines& machines);

// "80GiB", "24GB", "512MiB", or a number of bytes. Throws std::invalid_argument.
int64_t bytes_of_text(const std::string& text);

}  // namespace tessera
