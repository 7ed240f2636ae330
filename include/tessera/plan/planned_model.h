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

// The result of a rank's dry run.
struct PlannedRun {
  RunRecord record;
  std::vector<int64_t> owned_bytes;  // in stages 1 and 2: bytes of parameters that each rank owns; otherwise empty
};

// A model that a plan trains.
class PlannedModel {
 public:
  virtual ~PlannedModel() = default;

  // Dry run of two steps of AdamW with clipping by norm; with offload, of HostAdamW. `ranks_sharing_memory`: see
  // DryRunOptions. Throws like dry_run().
  PlannedRun run(const TrainingChoice& choice, int world_size, int rank, int ranks_sharing_memory = 0) const {
    return run_as(choice, {.world_size = world_size, .rank = rank, .ranks_sharing_memory = ranks_sharing_memory});
  }
  // Tokens of one rank's step, or items if there are no integer inputs.
  virtual int64_t tokens_of_rank() const = 0;
  // The source text of the wrap policy for these units; "" for no policy.
  virtual std::string policy_text(UnitChoice units) const = 0;
  // A description of the training data; "" if the model's own description covers it.
  virtual std::string description() const { return ""; }

 protected:
  virtual PlannedRun run_as(const TrainingChoice& choice, const DryRunOptions& where) const = 0;
};

// Returns a GPT-2 or Llama with these options, their batch and sequence, and cross entropy as its loss.
std::unique_ptr<PlannedModel> planned_decoder(const DecoderOptions& options);

// An archive of torch.export, on inputs of zeros (ExportedModule::example_inputs). The loss is the output "loss",
// otherwise the first floating-point scalar output, otherwise the sum of the first floating-point tensor. A unit is one
// of several numbered modules of a class, such as "layers.3". Throws ExportedError; also std::invalid_argument for
// unsupported sizes and archives without a floating-point output.
std::unique_ptr<PlannedModel> planned_archive(std::filesystem::path archive, int64_t batch, int64_t sequence);

}  // namespace tessera
