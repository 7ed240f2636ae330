#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>
#include <vector>

namespace tessera::internal {

// Returns the operator for a node's target ("torch.ops.aten.linear.default"). Throws ExportedError if no loaded library
// has the operator, or if its namespace is neither aten nor in `namespaces`. Also throws for ATen operators that are
// unsafe in an untrusted archive. For example, they open files, or could read any memory because they do not check
// sizes, strides or indices.
c10::OperatorHandle find_operator(const std::string& target, const std::vector<std::string>& namespaces);

// An operator argument whose value depends on Module::train() and eval(). The argument is either a training flag or
// the dropout probability, which is 0 in eval().
struct TrainingArgument {
  size_t index = 0;
  bool is_probability = false;
};
// Returns the operator's argument that depends on the mode, or nullopt if there is none.
std::optional<TrainingArgument> training_argument(const c10::FunctionSchema& schema);

// Returns whether the operator is a batch norm without a training mode, as in models decomposed in eval().
bool evaluates_for_good(const c10::FunctionSchema& schema);

}  // namespace tessera::internal
