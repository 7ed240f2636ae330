#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <optional>
#include <utility>

#include "exported/graph/steps.h"

namespace tessera::internal {

// The higher-order operators of torch.export, which run other graphs.

// Runs a graph under torch.set_grad_enabled(mode).
class GradModeStep : public GraphStep {
 public:
  GradModeStep(Call call, bool mode) : GraphStep(std::move(call)), mode_(mode) {}
  void run(Frame& frame) const override;

 private:
  const bool mode_;
};

// Runs a graph under torch.autocast(device, dtype, enabled, cache_enabled).
class AutocastStep : public GraphStep {
 public:
  struct Mode {
    std::optional<at::ScalarType> dtype;
    bool enabled = true;
    std::optional<bool> cache_enabled;
  };
  AutocastStep(Call call, Mode mode) : GraphStep(std::move(call)), mode_(mode) {}
  void run(Frame& frame) const override;

 private:
  const Mode mode_;
};

// torch.cond: operand 0 selects the graph, the others are its inputs.
class ConditionStep : public GraphStep {
 public:
  using GraphStep::GraphStep;
  void run(Frame& frame) const override;
};

// torch.while_loop: while graph 0 returns true, graph 1 replaces the first operands. Both graphs get all operands.
class LoopStep : public GraphStep {
 public:
  using GraphStep::GraphStep;
  void run(Frame& frame) const override;
};

// torch map and scan: runs the graph for each element of the first dimension of the scanned operands. The operands are
// `carried` ones, then `scanned` ones, then others that each run gets whole. The first results replace the carried
// operands for the next element. The other results are stacked.
class ScanStep : public GraphStep {
 public:
  ScanStep(Call call, size_t carried, size_t scanned)
      : GraphStep(std::move(call)), carried_(carried), scanned_(scanned) {}
  void run(Frame& frame) const override;

 private:
  const size_t carried_, scanned_;
};

// A graph whose activations are recomputed in backward (include/tessera/checkpointed.h).
class CheckpointStep : public GraphStep {
 public:
  using GraphStep::GraphStep;
  void run(Frame& frame) const override;
};

}  // namespace tessera::internal
