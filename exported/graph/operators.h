#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>
#include <vector>

namespace tessera::internal {

// The operator that a node's target names ("torch.ops.aten.linear.default"). Throws ExportedError if libtorch does not
// have it, if its namespace is neither aten nor among `namespaces` (of the program's own operators, or of libraries
// that it links), and for operators of ATen that an archive may not call: those that open files, and those that take
// geometry or indices on trust, with which memory could be read that is not the archive's.
c10::OperatorHandle find_operator(const std::string& target, const std::vector<std::string>& namespaces);

// What Module::train() and eval() change about an operator: an argument that says whether it trains, or the probability
// of dropout, which is 0 when it does not.
struct TrainingArgument {
  size_t index = 0;
  bool is_probability = false;
};
// Nothing for operators that do the same in both modes.
std::optional<TrainingArgument> training_argument(const c10::FunctionSchema& schema);

// Decomposed batch norm of eval(), which has no argument for the mode.
bool evaluates_for_good(const c10::FunctionSchema& schema);

// For operators that normalise by batch statistics, training or not, if they have no running ones: where those are.
std::optional<size_t> running_mean_argument(const c10::FunctionSchema& schema);

}  // namespace tessera::internal
