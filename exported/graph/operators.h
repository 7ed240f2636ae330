#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>
#include <vector>

namespace tessera::internal {

// Returns the operator that a node's target names ("torch.ops.aten.linear.default"). Throws ExportedError if libtorch
// lacks it, or if its namespace is neither aten nor in `namespaces` (of the program or of linked libraries). Also
// throws for operators that an archive must not call. These open files, or do not check geometry or indices and could
// read any memory.
c10::OperatorHandle find_operator(const std::string& target, const std::vector<std::string>& namespaces);

// The argument of an operator that Module::train() and eval() change: a training flag, or the probability of dropout,
// which is 0 in eval().
struct TrainingArgument {
  size_t index = 0;
  bool is_probability = false;
};
// Returns nullopt for operators that do not depend on the mode.
std::optional<TrainingArgument> training_argument(const c10::FunctionSchema& schema);

// Returns whether the operator is a batch norm that was decomposed in eval(). It has no argument for the mode.
bool evaluates_for_good(const c10::FunctionSchema& schema);

// Operators that normalise by batch statistics in both modes if they have no running statistics: returns the index of
// the running mean.
std::optional<size_t> running_mean_argument(const c10::FunctionSchema& schema);

}  // namespace tessera::internal
