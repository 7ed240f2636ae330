#pragma once

#include <string>
#include <vector>

#include <tessera/zero.h>

namespace tessera {

// What becomes a unit of FullyShardedDataParallel.
enum class UnitChoice : uint8_t {
  kLayers,   // each of the model's repeated layers
  kLinears,  // each Linear within them: less is gathered at a time, in more collectives
  kWhole     // all of it at once
};

// One way to train a model: what zero() and the model take.
struct TrainingChoice {
  int stage = 0;
  bool reshard_after_forward = true;  // stage 3
  // Stage 3: gathered and computed with in bfloat16, reduced in fp32. Before: libtorch's autocast around the forward.
  bool bf16 = false;
  bool checkpointed = false;               // each layer is computed again in backward
  UnitChoice units = UnitChoice::kLayers;  // stage 3
  int ranks_per_copy = 0;                  // stage 3: HybridSharding; 0: one copy over all ranks
  int ranks_per_secondary_copy = 0;        // stage 3 with reshard_after_forward: HybridSharding; 0: none
  int prefetch = 1;                        // stage 3
  bool offload = false;                    // stages 1 to 3: gradients, state and, in 3, shards in host memory
  bool operator==(const TrainingChoice&) const = default;
};

// The choices that a plan compares, each a dry run: the stages, in stage 3 with and without resharding; in fp32 and
// bf16; everything with and without checkpointing. The rest as by default.
std::vector<TrainingChoice> training_choices();

// For zero(). `units`: the policy of the choice's units.
ZeroOptions zero_options(const TrainingChoice& choice, WrapPolicy units);
// For a program: "tessera::ZeroOptions{.stage = 3, .fsdp = {...}}", where `units` is how it writes that policy; with
// what else is to be done.
std::string options_text(const TrainingChoice& choice, const std::string& units);

}  // namespace tessera
