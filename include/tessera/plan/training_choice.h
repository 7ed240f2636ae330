#pragma once

#include <string>
#include <vector>

#include <tessera/zero.h>

namespace tessera {

// The modules that become units of FullyShardedDataParallel.
enum class UnitChoice : uint8_t {
  kLayers,   // each repeated layer
  kLinears,  // each Linear in the layers: smaller gathers, more collectives
  kWhole     // the whole model
};

// One way to train a model: options of zero() and of the model.
struct TrainingChoice {
  int stage = 0;
  bool reshard_after_forward = true;  // stage 3: FsdpOptions::reshard_after_forward
  // Stage 3: gathers and computes in bfloat16, reduces in fp32. Stages 0 to 2: libtorch's autocast around forward.
  bool bf16 = false;
  bool checkpointed = false;               // true: backward recomputes each layer
  UnitChoice units = UnitChoice::kLayers;  // stage 3: the modules that become units
  int ranks_per_copy = 0;                  // stage 3: HybridSharding; 0: one copy over all ranks
  int ranks_per_secondary_copy = 0;        // stage 3 with reshard_after_forward: HybridSharding; 0: none
  int prefetch = 1;                        // stage 3: FsdpOptions::prefetch
  // Stages 1 to 3. true: gradients, optimizer state and (stage 3) shards are in host memory.
  bool offload = false;
  bool operator==(const TrainingChoice&) const = default;
};

// Returns the choices that a plan compares by dry runs: all stages, stage 3 with and without resharding, fp32 and bf16,
// with and without checkpointing.
std::vector<TrainingChoice> training_choices();

// Returns the options for zero(). `units` must be the wrap policy for the choice's UnitChoice.
ZeroOptions zero_options(const TrainingChoice& choice, WrapPolicy units);
// Returns source text of the options, "tessera::ZeroOptions{.stage = 3, .fsdp = {...}}", with `units` as the wrap
// policy. Also describes other changes that the program needs for this choice.
std::string options_text(const TrainingChoice& choice, const std::string& units);

}  // namespace tessera
