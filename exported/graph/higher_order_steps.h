#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <optional>
#include <utility>

#include "exported/graph/steps.h"

namespace tessera::internal {

// The steps for the higher-order operators of torch.export, which run nested graphs.

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
    bool applies = true;  // false: for a device type other than the export's, so that the step only runs the graph
    std::optional<at::ScalarType> dtype;
    bool enabled = true;
    std::optional<bool> cache_enabled;
  };
  AutocastStep(Call call, Mode mode) : GraphStep(std::move(call)), mode_(mode) {}
  void run(Frame& frame) const override;

 private:
  const Mode mode_;
};

// Implements torch.cond. Operand 0 selects the graph to run. The other operands are inputs of the selected graph.
class ConditionStep : public GraphStep {
 public:
  using GraphStep::GraphStep;
  void run(Frame& frame) const override;
};

// Implements torch.while_loop. While graph 0 returns true, runs graph 1, whose results replace the first operands.
class LoopStep : public GraphStep {
 public:
  using GraphStep::GraphStep;
  void run(Frame& frame) const override;
};

// Implements torch's map and scan. The operands are `carried` values, then `scanned` values, then constant values.
// Runs the graph once for each slice of the scanned operands along their first dimension. The first results of a run
// replace the carried operands of the next run. Stacks the other results of all runs. Throws if there is no slice.
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
