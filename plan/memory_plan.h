#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/plan/decoder.h"
#include "tessera/plan/run_record.h"
#include "tessera/plan/step_time.h"

namespace tessera {

// One way to train a model: what zero() and the model take.
struct TrainingChoice {
  int stage = 0;
  bool reshard_after_forward = true;  // stage 3
  bool bf16 = false;                  // stage 3: parameters gathered and computed with in bfloat16, reduced in fp32
  bool checkpointed = false;          // each layer is computed again in backward
};

// The choices that a plan compares, each a dry run: the stages; in stage 3 with and without resharding, in fp32 and
// bf16; everything with and without checkpointing.
std::vector<TrainingChoice> training_choices();

// What a choice takes on one rank: two steps of AdamW with clipping by norm.
struct PlannedTraining {
  TrainingChoice choice;
  BytesByKind peak;              // of rank 0
  int64_t collective_bytes = 0;  // of a step, by full tensors
  int64_t flop = 0;              // of a step, with what is computed again
  int64_t tokens = 0;            // of a step, of all ranks
  std::optional<StepTime> time;  // of a step, without intervals, where the machine's speed is known
};
// A dry run of two steps as rank 0, which throws as dry_run() does.
RunRecord record_of(const DecoderOptions& model, const TrainingChoice& choice, int world_size);
// What of it a plan compares; with `speed` its time too, which throws as predict_step() does.
PlannedTraining plan_training(const DecoderOptions& model, const TrainingChoice& choice, int world_size,
                              const MachineSpeed* speed = nullptr);

// Of those of which the peak is at most kUsable of `memory_bytes`, the fastest where times are known; then, or else,
// the one that computes least again, then exchanges least, then takes least; -1 if none. The rest of a GPU's memory is
// for its allocator, the kernels' scratch and the driver, which a dry run does not see.
inline constexpr double kUsable = 0.9;
// An index of `plans`.
int recommended(const std::vector<PlannedTraining>& plans, int64_t memory_bytes);

// For a program: "tessera::ZeroOptions{.stage = 3, .fsdp = {...}}".
std::string options_text(const TrainingChoice& choice);
// A table of what each takes, the milliseconds of a step and tokens a second where they are known, which fit, the
// recommended one and its options.
std::string plan_text(const std::vector<PlannedTraining>& plans, int world_size, int64_t memory_bytes);

// "80GiB", "24GB", "512MiB", or a number of bytes. Throws std::invalid_argument.
int64_t bytes_of_text(const std::string& text);

}  // namespace tessera
