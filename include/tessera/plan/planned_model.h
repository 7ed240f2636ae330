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

// The result of the dry run of one rank.
struct PlannedRun {
  RunRecord record;
  std::vector<int64_t> owned_bytes;  // in stages 1 and 2: bytes of parameters that each rank owns; otherwise empty
};

// The interface of models for which a plan can be made.
class PlannedModel {
 public:
  virtual ~PlannedModel() = default;

  // Makes a dry run of two steps of AdamW, or of HostAdamW if the choice has offload, with clipping by norm.
  // `ranks_sharing_memory`: see DryRunOptions. Throws like dry_run().
  PlannedRun run(const TrainingChoice& choice, int world_size, int rank, int ranks_sharing_memory = 0) const {
    return run_as(choice, {.world_size = world_size, .rank = rank, .ranks_sharing_memory = ranks_sharing_memory});
  }
  // Returns the number of tokens in a rank's step. If the first input is not integral, returns the number of samples.
  virtual int64_t tokens_of_rank() const = 0;
  // Returns the source text of the wrap policy for these units; "" for no policy.
  virtual std::string policy_text(UnitChoice units) const = 0;
  // Returns a note for the plan: the inputs and the loss, or features that the plan omits; "" if there is none.
  virtual std::string description() const { return ""; }

 protected:
  virtual PlannedRun run_as(const TrainingChoice& choice, const DryRunOptions& where) const = 0;
};

// Returns a GPT-2 or Llama with these options, which also define batch and sequence. The loss is cross entropy.
std::unique_ptr<PlannedModel> planned_decoder(const DecoderOptions& options);

// Returns the model of an archive of torch.export, with inputs of zeros (ExportedModule::example_inputs). The loss is
// the output "loss". If there is none, the loss is the first scalar among the floating-point outputs that need
// gradients; if there is no scalar, the sum of the first of these outputs. If a class has several numbered modules,
// such as "layers.3", each is a unit. Throws ExportedError, and std::invalid_argument for unsupported sizes and for
// archives without such an output.
std::unique_ptr<PlannedModel> planned_archive(std::filesystem::path archive, int64_t batch, int64_t sequence);

}  // namespace tessera
