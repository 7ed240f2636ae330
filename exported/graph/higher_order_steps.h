#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <optional>
#include <utility>

#include "exported/graph/steps.h"

namespace tessera::internal {

// The higher-order operators of torch.export: what each does with the graphs that it is given.

// with torch.set_grad_enabled(mode): ...
class GradModeStep : public GraphStep {
 public:
  GradModeStep(Call call, bool mode) : GraphStep(std::move(call)), mode_(mode) {}
  void run(Frame& frame) const override;

 private:
  const bool mode_;
};

// with torch.autocast(device, dtype, enabled, cache_enabled): ...
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

// torch.cond: operand 0 chooses the graph, the others are its inputs.
class ConditionStep : public GraphStep {
 public:
  using GraphStep::GraphStep;
  void run(Frame& frame) const override;
};

// torch.while_loop: while graph 0 says so, graph 1 makes new values of as many operands, the first ones; both are
// given the others too.
class LoopStep : public GraphStep {
 public:
  using GraphStep::GraphStep;
  void run(Frame& frame) const override;
};

// torch map and scan: the graph is run for each element of the first dimension of some operands, and is given the last
// ones whole. Its first results are carried on to the next element, and begin with the first operands; others are
// stacked. Operands: `carried`, then `scanned`, then the rest.
class ScanStep : public GraphStep {
 public:
  ScanStep(Call call, size_t carried, size_t scanned)
      : GraphStep(std::move(call)), carried_(carried), scanned_(scanned) {}
  void run(Frame& frame) const override;

 private:
  const size_t carried_, scanned_;
};

// A graph that backward computes again (include/tessera/checkpointed.h).
class CheckpointStep : public GraphStep {
 public:
  using GraphStep::GraphStep;
  void run(Frame& frame) const override;
};

}  // namespace tessera::internal
