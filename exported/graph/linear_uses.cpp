#include "exported/graph/linear_uses.h"

#include <map>

#include "exported/graph/steps.h"

namespace tessera::internal {
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
