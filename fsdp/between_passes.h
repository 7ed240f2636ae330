#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "fsdp/sharded_model.h"

namespace tessera::internal {

// Logs actions between two backward passes: freezing, clearing gradients, a step. All ranks must run equal actions, and
// they compare their logs at the end of the next pass. If logs differ, the error names a rank that omitted an action.
class BetweenPasses {
 public:
  // `model` must outlive this object.
  explicit BetweenPasses(ShardedModel& model);

  // Must be called when a pass begins. `is_observed`: whether an observer runs optimizer steps during passes.
  void pass_begins(bool is_observed);
  // Must be called after a pass that reduced gradients.
  void pass_ended(bool is_observed);

 private:
  struct Parameter {
    PlannedParameter planned;
    at::Tensor shard;
    Range ranks;  // the ranks that have elements of the parameter
    bool trained = false;
    bool has_gradient = false;  // whether the shard had a gradient after the last reducing pass
  };
  uint64_t writes() const;
  bool all_ranks_step() const;

  ShardedModel& model_;
  std::vector<Parameter> parameters_;
  bool gradients_changed_ = false;      // whether the last reducing pass changed the set of parameters with gradients
  std::optional<bool> all_ranks_step_;  // whether every rank has a trained element with a gradient; empty: unknown
  std::optional<uint64_t> writes_;      // shards' write count when the last pass began or ended; empty: not compared
};

}  // namespace tessera::internal
