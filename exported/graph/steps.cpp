#include "exported/graph/steps.h"

#include <ATen/ops/_native_batch_norm_legit.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>

#include <map>
#include <utility>

#include <tessera/autocast.h>
#include <tessera/checkpointed.h>
#include "exported/graph/higher_order_steps.h"

namespace tessera::internal {

// ---- operators ----------------------------------------------------------------------------------

void OperatorStep::run(Frame& frame) const {
  if (only_in_training_ && frame.execution->training[*only_in_training_] == 0) return;
  torch::jit::Stack stack;
  stack.reserve(operands().size());
  for (const Operand& operand : operands()) stack.push_back(operand.get(frame));
  if (switch_) apply_switch(stack, *frame.execution);
  call(stack);
  size_t result = 0;
  for (size_t i = 0; i < returns_.size(); ++i) {
    if (returns_[i] < 0) {
      set_result(frame, result++, std::move(stack[i]));
      continue;
    }
    const std::vector<at::Tensor> list = stack[i].toTensorVector();
    TORCH_CHECK(list.size() == static_cast<size_t>(returns_[i]), "it returned ", list.size(), " tensors, when it was ",
                "exported ", returns_[i]);
    for (const at::Tensor& tensor : list) set_result(frame, result++, tensor);
  }
}

void OperatorStep::call(torch::jit::Stack& stack) const {
  if (!is_functional_batch_norm_) return op_.callBoxed(stack);
  auto optional = [&](size_t i) { return stack[i].isNone() ? std::nullopt : std::optional(stack[i].toTensor()); };
  at::Tensor mean = stack[3].toTensor().clone(), variance = stack[4].toTensor().clone();
  auto [output, saved_mean, saved_scale] =
      at::_native_batch_norm_legit(stack[0].toTensor(), optional(1), optional(2), mean, variance, stack[5].toBool(),
                                   stack[6].toDouble(), stack[7].toDouble());
  stack = {output, saved_mean, saved_scale, mean, variance};
}

// Sets the argument for the module's current mode. If the mode is that of the export, keeps the exported argument.
// This argument need not match the mode: a Python model may apply dropout in eval().
void OperatorStep::apply_switch(torch::jit::Stack& stack, const Execution& execution) const {
  const bool is_training = execution.training[switch_->module] != 0;
  if (is_training == switch_->module_was_training) return;
  c10::IValue& argument = stack[switch_->argument.index];
  if (!switch_->argument.is_probability) {
    argument = is_training;
  } else if (!is_training) {
    argument = 0.0;
  }
}

// ---- nested graphs -------------------------------------------------------------------------------

std::vector<c10::IValue> GraphStep::take_operands(Frame& frame, size_t first) const {
  std::vector<c10::IValue> values;
  for (size_t i = first; i < operands().size(); ++i) values.push_back(operands()[i].get(frame));
  return values;
}

void GraphStep::set_results(Frame& frame, std::vector<c10::IValue> values) const {
  TORCH_CHECK(values.size() == results().size(), "its graph returned ", values.size(), " values, expected ",
              results().size());
  for (size_t i = 0; i < values.size(); ++i) set_result(frame, i, std::move(values[i]));
}

void GradModeStep::run(Frame& frame) const {
  const at::AutoGradMode mode(mode_);
  set_results(frame, graph()->run(take_operands(frame), frame.execution));
}

void AutocastStep::run(Frame& frame) const {
  std::optional<Autocast> autocast;
  if (mode_.applies) autocast.emplace(frame.execution->device.type(), mode_.dtype, mode_.enabled, mode_.cache_enabled);
  set_results(frame, graph()->run(take_operands(frame), frame.execution));
}

void ConditionStep::run(Frame& frame) const {
  const c10::IValue chosen = operands()[0].get(frame);
  const bool is_true = chosen.isTensor() ? chosen.toTensor().item<bool>() : chosen.toScalar().toBool();
  set_results(frame, graph(is_true ? 0 : 1)->run(take_operands(frame, 1), frame.execution));
}

void LoopStep::run(Frame& frame) const {
  std::vector<c10::IValue> values = take_operands(frame);
  auto goes_on = [&] {
    const c10::IValue answer = graph(0)->run(values, frame.execution).at(0);
    return answer.isTensor() ? answer.toTensor().item<bool>() : answer.toScalar().toBool();
  };
  while (goes_on()) {
    std::vector<c10::IValue> next = graph(1)->run(values, frame.execution);
    TORCH_CHECK(next.size() <= values.size(), "its body returned ", next.size(), " values, expected at most ",
                values.size());
    std::move(next.begin(), next.end(), values.begin());
  }
  values.resize(result_count());
  set_results(frame, std::move(values));
}

void ScanStep::run(Frame& frame) const {
  const std::vector<c10::IValue> values = take_operands(frame);
  std::vector<c10::IValue> given = values;
  int64_t count = -1;
  for (size_t i = carried_; i < carried_ + scanned_; ++i) {
    const at::Tensor tensor = values[i].toTensor();
    TORCH_CHECK(tensor.dim() > 0 && (count < 0 || tensor.size(0) == count), "operand ", i, " has the shape ",
                tensor.sizes(), ", expected ", count < 0 ? 1 : count, " elements or more in its first dimension");
    count = tensor.size(0);
  }
  TORCH_CHECK(count > 0, "there is nothing to go over: expected one element or more, got ", count);
  std::vector<std::vector<at::Tensor>> stacks(result_count() - carried_);
  for (int64_t element = 0; element < count; ++element) {
    for (size_t i = carried_; i < carried_ + scanned_; ++i) given[i] = values[i].toTensor().select(0, element);
    std::vector<c10::IValue> results = graph()->run(given, frame.execution);
    std::move(results.begin(), results.begin() + static_cast<std::ptrdiff_t>(carried_), given.begin());
    for (size_t i = 0; i < stacks.size(); ++i) stacks[i].push_back(results[carried_ + i].toTensor());
  }
  given.resize(carried_);
  for (const auto& stack : stacks) given.emplace_back(at::stack(stack));
  set_results(frame, std::move(given));
}

void CheckpointStep::run(Frame& frame) const {
  std::vector<c10::IValue> inputs = take_operands(frame);
  std::vector<at::Tensor> tensors;
  std::vector<size_t> places;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].isTensor() || !inputs[i].toTensor().defined()) continue;
    tensors.push_back(std::exchange(inputs[i], c10::IValue()).toTensor());
    places.push_back(i);
  }
  // Keeps all outputs of the first run, because run_checkpointed() returns only those that are tensors.
  auto outputs = std::make_shared<std::vector<c10::IValue>>();
  auto compute = [graph = graph(), execution = frame.execution, others = std::move(inputs), places,
                  weak = std::weak_ptr(outputs)](const std::vector<at::Tensor>& given) {
    std::vector<c10::IValue> values = others;
    for (size_t i = 0; i < places.size(); ++i) values[places[i]] = given[i];
    values = graph->run(std::move(values), execution);
    std::vector<at::Tensor> results;
    for (c10::IValue& value : values)
      if (value.isTensor() && value.toTensor().defined()) results.push_back(value.toTensor());
    if (const auto kept = weak.lock(); kept && kept->empty()) *kept = std::move(values);
    return results;
  };
  const std::vector<at::Tensor> results = run_checkpointed(std::move(compute), std::move(tensors));
  size_t next = 0;
  for (c10::IValue& value : *outputs)
    if (value.isTensor() && value.toTensor().defined()) value = results[next++];
  set_results(frame, std::move(*outputs));
}

// ---- uses of weights ----------------------------------------------------------------------------

namespace {

struct Uses {
  std::vector<bool> by_linear, by_others;
};

void collect(const Graph& graph, Uses& uses) {
  std::map<int, size_t> of_slot;
  for (const Graph::State& own : graph.state) of_slot[own.slot] = own.index;
  auto note = [&](const Operand& operand, bool is_weight) {
    for (const int slot : operand.slots())
      if (const auto own = of_slot.find(slot); own != of_slot.end())
        (is_weight ? uses.by_linear : uses.by_others)[own->second] = true;
  };
  for (const auto& step : graph.steps) {
    const auto* call = dynamic_cast<const OperatorStep*>(step.get());
    const bool is_linear = call != nullptr && call->op().schema().name() == "aten::linear";
    for (size_t i = 0; i < step->operands().size(); ++i)
      note(step->operands()[i], is_linear && i == 1 && step->operands()[i].kind() == Operand::Kind::kSlot);
    if (const auto* inside = dynamic_cast<const GraphStep*>(step.get()))
      for (const auto& inner : inside->graphs()) collect(*inner, uses);
  }
  for (const Operand& output : graph.outputs) note(output, false);
}

}  // namespace

std::vector<bool> used_by_linear_alone(const Graph& graph, size_t state_count) {
  Uses uses{std::vector<bool>(state_count), std::vector<bool>(state_count)};
  collect(graph, uses);
  std::vector<bool> alone(state_count);
  for (size_t i = 0; i < state_count; ++i) alone[i] = uses.by_linear[i] && !uses.by_others[i];
  return alone;
}

}  // namespace tessera::internal
