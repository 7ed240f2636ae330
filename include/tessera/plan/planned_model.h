#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <tessera/plan/decoder.h>
#include <tessera/plan/dry_run.h>
#include <tessera/plan/run_record.h>
#include <tessera/plan/training_choice.h>

namespace tessera {

// A dry run of a rank.
struct PlannedRun {
  RunRecord record;
  std::vector<int64_t> owned_bytes;  // by rank, of parameters, in stages 1 and 2, where they have owners; else empty
};

// A model that a plan trains.
class PlannedModel {
 public:
  virtual ~PlannedModel() = default;

  // A dry run of two steps of AdamW with clipping by norm; with offload, of HostAdamW. `ranks_sharing_memory`: as
  // DryRunOptions has it. Throws as dry_run().
  PlannedRun run(const TrainingChoice& choice, int world_size, int rank, int ranks_sharing_memory = 0) const {
    return run_as(choice, {.world_size = world_size, .rank = rank, .ranks_sharing_memory = ranks_sharing_memory});
  }
  // Tokens, or items where it has no integers, of one rank's step.
  virtual int64_t tokens_of_rank() const = 0;
  // How a program writes the policy of such units; "" for none.
  virtual std::string policy_text(UnitChoice units) const = 0;
  // What is trained on, for people; "" where the model's own description says it.
  virtual std::string description() const { return ""; }

 protected:
  virtual PlannedRun run_as(const TrainingChoice& choice, const DryRunOptions& where) const = 0;
};

// GPT-2 or Llama by its numbers, on its options' batch and sequence, with cross entropy.
std::unique_ptr<PlannedModel> planned_decoder(const DecoderOptions& options);

// An archive of torch.export, on inputs of zeros (ExportedModule::example_inputs). Its loss is the output "loss", or
// else the first floating-point number among the outputs, or else the sum of the first floating-point tensor; a unit is
// a module that is numbered among others of its class, as "layers.3". Throws ExportedError, and std::invalid_argument
// for sizes that the model was not exported for and an archive without a floating-point output.
std::unique_ptr<PlannedModel> planned_archive(std::filesystem::path archive, int64_t batch, int64_t sequence);

}  // namespace tessera
