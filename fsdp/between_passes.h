#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "fsdp/sharded_model.h"

namespace tessera::internal {

// Logs the acts between two backward passes that all ranks must do alike: freezing, clearing gradients, a step. The
// ranks compare their logs at the end of the pass, so that a rank which leaves one out is named.
class BetweenPasses {
 public:
  // `model` must outlive it.
  explicit BetweenPasses(ShardedModel& model);

  // A pass begins. `is_observed`: steps are taken during passes, so that none is expected between them.
  void pass_begins(bool is_observed);
  // A pass that reduced has ended.
  void pass_ended(bool is_observed);

 private:
  struct Parameter {
    PlannedParameter planned;
    at::Tensor shard;
    Range ranks;  // of the ranks that have elements of it
    bool trained = false;
    bool has_gradient = false;  // since the last pass that reduced
  };
  uint64_t writes() const;
  bool all_ranks_step() const;

  ShardedModel& model_;
  std::vector<Parameter> parameters_;
  bool gradients_changed_ = false;      // whether other parameters have gradients than a pass before
  std::optional<bool> all_ranks_step_;  // whether every rank has a trained element with a gradient
  std::optional<uint64_t> writes_;      // to all shards, when the last pass began or ended
};

}  // namespace tessera::internal
