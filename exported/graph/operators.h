#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>
#include <vector>

namespace tessera::internal {

// Returns the operator that a node's target names ("torch.ops.aten.linear.default"). Throws ExportedError if libtorch
// lacks it, or if its namespace is neither aten nor in `namespaces` (of the program or of linked libraries). Also
// throws for operators that an archive must not call: they open files, or could read any memory, because they check
// neither geometry nor indices.
c10::OperatorHandle find_operator(const std::string& target, const std::vector<std::string>& namespaces);

// The argument of an operator that Module::train() and eval() change: a training flag, or the probability of dropout,
// which is 0 in eval().
struct TrainingArgument {
  size_t index = 0;
  bool is_probability = false;
};
// Returns the argument of the operator that depends on the mode, or nullopt if there is none.
std::optional<TrainingArgument> training_argument(const c10::FunctionSchema& schema);

// Returns whether the operator is a batch norm that was decomposed in eval(). Such an operator cannot be switched.
bool evaluates_for_good(const c10::FunctionSchema& schema);

// Returns the index of the argument `running_mean`, or nullopt if the operator has none. If the argument is None, the
// operator normalizes by batch statistics in both modes.
std::optional<size_t> running_mean_argument(const c10::FunctionSchema& schema);

}  // namespace tessera::internal
