#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "exported/graph/graph.h"
#include "exported/graph/operators.h"

namespace tessera::internal {

// One entry for each value that a node's operator returns: the length of a list of tensors, or -1 for a single value.
using ReturnLengths = std::vector<int>;

// A node that calls an operator through the dispatcher.
class OperatorStep : public Step {
 public:
  // The argument whose value depends on train() and eval(), and the module whose mode selects the value.
  struct Switch {
    TrainingArgument argument;
    size_t module = 0;         // index in Execution::training
    bool module_was_training;  // whether the module was in train() during the export
  };

  OperatorStep(std::string description, std::string module, c10::OperatorHandle op, std::vector<Operand> operands,
               ReturnLengths returns)
      : Step(std::move(description), std::move(module), std::move(operands)),
        op_(std::move(op)),
        returns_(std::move(returns)) {}

  void run(Frame& frame) const override;

  const c10::OperatorHandle& op() const { return op_; }
  void switch_with(Switch training) { switch_ = training; }
  // Makes the step a no-op while the module is in eval(). Used for nodes that increment num_batches_tracked.
  void run_only_in_training(size_t module) { only_in_training_ = module; }

 private:
  void apply_switch(torch::jit::Stack& stack, const Execution& execution) const;
  void call(torch::jit::Stack& stack) const;

  const c10::OperatorHandle op_;
  // True if the operator is the batch norm that returns new running statistics instead of updating its arguments.
  // Decomposed programs use this operator. libtorch cannot differentiate it, so call() uses another operator.
  const bool is_functional_batch_norm_ = op_.schema().name() == "aten::_native_batch_norm_legit_functional";
  const ReturnLengths returns_;
  std::optional<Switch> switch_;
  std::optional<size_t> only_in_training_;
};

// A node that computes with numbers derived from shapes, by Python's arithmetic.
class NumberStep : public Step {
 public:
  using Function = c10::IValue (*)(const std::vector<c10::IValue>& arguments);
  // Returns the function for a target ("_operator.mul", "torch.sym_max") and a number of arguments, or null if unknown.
  static Function find(const std::string& target, size_t arguments);

  NumberStep(std::string description, std::string module, Function function, std::vector<Operand> operands)
      : Step(std::move(description), std::move(module), std::move(operands)), function_(function) {}
  void run(Frame& frame) const override;

 private:
  const Function function_;
};

// A node that runs one or more nested graphs on its operands.
class GraphStep : public Step {
 public:
  struct Call {
    std::string description, module;
    std::vector<Operand> operands;
    std::vector<std::shared_ptr<const Graph>> graphs;
  };
  explicit GraphStep(Call call)
      : Step(std::move(call.description), std::move(call.module), std::move(call.operands)),
        graphs_(std::move(call.graphs)) {}

  size_t result_count() const { return graphs_.back()->outputs.size(); }
  const std::vector<std::shared_ptr<const Graph>>& graphs() const { return graphs_; }

 protected:
  const std::shared_ptr<const Graph>& graph(size_t index = 0) const { return graphs_[index]; }
  std::vector<c10::IValue> take_operands(Frame& frame, size_t first = 0) const;
  void set_results(Frame& frame, std::vector<c10::IValue> values) const;

 private:
  const std::vector<std::shared_ptr<const Graph>> graphs_;
};

// Returns one flag for each tensor of Execution::state. The flag is true if the graph and its nested graphs use the
// tensor only as the weight of aten.linear.
std::vector<bool> used_by_linear_alone(const Graph& graph, size_t state_count);

}  // namespace tessera::internal
