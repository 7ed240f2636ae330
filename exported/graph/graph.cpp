#include "exported/graph/graph.h"

#include <ATen/ScalarOps.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>

namespace tessera::internal {
namespace {

double as_float(const c10::IValue& number) { return number.toScalar().toDouble(); }

}  // namespace

// ---- operands -----------------------------------------------------------------------------------

at::Tensor wrapped_number(const c10::IValue& number) {
  at::Tensor tensor = c10::scalar_to_tensor(number.toScalar());
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

template <class Element, class Get>
c10::IValue Operand::list_of(Get get) const {
  c10::List<Element> list;
  list.reserve(slots_.size());
  for (size_t i = 0; i < slots_.size(); ++i) list.push_back(get(i));
  return list;
}

c10::IValue Operand::get(Frame& frame) const {
  auto element = [&](size_t i) -> const c10::IValue& {
    return slots_[i] == kNoSlot ? constants_[i] : frame.values[static_cast<size_t>(slots_[i])];
  };
  switch (kind_) {
    case Kind::kConstant:
      return constant_;
    case Kind::kDevice:
      return frame.execution->device;
    case Kind::kSlot: {
      c10::IValue& value = frame.values[static_cast<size_t>(slots_[0])];
      return is_last_use_ ? std::move(value) : value;
    }
    case Kind::kWrappedNumber: {
      const c10::IValue& value = frame.values[static_cast<size_t>(slots_[0])];
      return value.isTensor() ? value : c10::IValue(wrapped_number(value));
    }
    case Kind::kFloat:
      return as_float(frame.values[static_cast<size_t>(slots_[0])]);
    case Kind::kTensors:
      return list_of<at::Tensor>([&](size_t i) { return element(i).toTensor(); });
    case Kind::kOptionalTensors:
      return list_of<std::optional<at::Tensor>>(
          [&](size_t i) { return element(i).isNone() ? std::nullopt : std::optional(element(i).toTensor()); });
    case Kind::kInts:
      return list_of<int64_t>([&](size_t i) { return element(i).toInt(); });
    case Kind::kFloats:
      return list_of<double>([&](size_t i) { return as_float(element(i)); });
    case Kind::kBools:
      return list_of<bool>([&](size_t i) { return element(i).toBool(); });
  }
  throw std::logic_error("an operand of no kind");
}

// ---- graphs -------------------------------------------------------------------------------------

void Graph::plan_lifetimes() {
  std::set<int> used, kept;  // `kept` contains the slots of state and outputs, which no step may free
  for (const Operand& output : outputs) used.insert(output.slots().begin(), output.slots().end());
  kept = used;
  for (const State& own : state) kept.insert(own.slot);
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    for (int& result : (*step)->results())
      if (!used.contains(result)) result = kNoSlot;
    std::map<int, int> uses;
    for (const Operand& operand : (*step)->operands())
      for (const int slot : operand.slots())
        if (slot != kNoSlot) ++uses[slot];
    for (const auto& [slot, count] : uses) {
      if (!used.insert(slot).second || kept.contains(slot)) continue;
      auto& operands = (*step)->operands();
      const auto only = std::ranges::find_if(operands, [slot = slot](const Operand& operand) {
        return operand.kind() == Operand::Kind::kSlot && operand.slots()[0] == slot;
      });
      if (count == 1 && only != operands.end()) {
        only->set_last_use();
      } else {
        (*step)->frees().push_back(slot);
      }
    }
  }
  for (int& input : inputs)
    if (!used.contains(input)) input = kNoSlot;
  std::erase_if(state, [&](const State& own) { return !used.contains(own.slot); });
}

std::vector<c10::IValue> Graph::run(std::vector<c10::IValue> given,
                                    const std::shared_ptr<const Execution>& execution) const {
  // Checks the count here, because an untrusted archive may call a nested graph with a wrong number of inputs.
  TORCH_CHECK(given.size() == inputs.size(), "a graph was given ", given.size(), " values, expected ", inputs.size());
  Frame frame{std::vector<c10::IValue>(static_cast<size_t>(slot_count)), execution};
  for (const State& own : state) frame.values[static_cast<size_t>(own.slot)] = execution->state[own.index];
  for (size_t i = 0; i < inputs.size(); ++i)
    if (inputs[i] != kNoSlot) frame.values[static_cast<size_t>(inputs[i])] = std::move(given[i]);
  given.clear();
  const Step* current = nullptr;
  try {
    for (const auto& step : steps) {
      current = step.get();
      step->run(frame);
      for (const int slot : step->frees()) frame.values[static_cast<size_t>(slot)] = c10::IValue();
    }
  } catch (c10::Error& error) {
    error.add_context("in " + current->description());
    throw;
  }
  std::vector<c10::IValue> results;
  results.reserve(outputs.size());
  for (const Operand& output : outputs) results.push_back(output.get(frame));
  return results;
}

}  // namespace tessera::internal
