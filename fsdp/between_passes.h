#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "fsdp/sharded_model.h"

namespace tessera::internal {

// Logs actions between two backward passes that all ranks must take alike: freezing, clearing gradients, a step. Ranks
// compare their logs at the end of the pass; the error names a rank that omitted an action.
class BetweenPasses {
 public:
  // `model` must outlive it.
  explicit BetweenPasses(ShardedModel& model);

  // Must be called as a pass begins. `is_observed`: steps are taken during passes, not between them.
  void pass_begins(bool is_observed);
  // Must be called after a pass that reduced gradients.
  void pass_ended(bool is_observed);

 private:
  struct Parameter {
    PlannedParameter planned;
    at::Tensor shard;
    Range ranks;  // the ranks that have elements of the parameter
    bool trained = false;
    bool has_gradient = false;  // since the last pass that reduced
  };
  uint64_t writes() const;
  bool all_ranks_step() const;

  ShardedModel& model_;
  std::vector<Parameter> parameters_;
  bool gradients_changed_ = false;      // whether the set of parameters with gradients has changed
  std::optional<bool> all_ranks_step_;  // whether every rank has a trained element with a gradient
  std::optional<uint64_t> writes_;      // count of writes to all shards when the last pass began or ended
};

}  // namespace tessera::internal
