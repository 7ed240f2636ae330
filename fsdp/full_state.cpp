#include "fsdp/full_state.h"

#include <unordered_set>

#include <tessera/model/data_parallel.h>

namespace tessera::internal {

void visit_full_state(ShardedModel& model, const VisitState& visit, const StateDictOptions& options) {
  const bool keep = !options.rank0_only || model.mesh().world->rank() == 0;
  std::unordered_set<std::string> sharded;
  auto show = [&](const std::string& name, const at::Tensor& tensor, const std::vector<std::string>& aliases = {}) {
    if (keep) visit(name, aliases, options.offload_to_cpu ? tensor.cpu() : tensor);
  };
  // An aborted all-gather must not be shown.
  auto settle = [&] {
    if (keep) model.mesh().world->throw_if_aborted("full_state_dict");
  };
  for (auto& unit : model.units()) {
    for (auto& paged : unit->flat_parameters()) {
      const at::Tensor full = unit->full_values(*paged);
      settle();
      for (size_t i = 0; i < paged->flat.parameters().size(); ++i) {
        const PlannedParameter& parameter = paged->flat.parameters()[i];
        sharded.insert(parameter.fqn);
        sharded.insert(parameter.aliases.begin(), parameter.aliases.end());
        show(parameter.fqn, paged->flat.view_in(full, i), parameter.aliases);
      }
    }
  }
  settle();
  for (const auto& parameter : model.module()->named_parameters())
    if (!sharded.contains(parameter.key())) show(parameter.key(), parameter.value().detach());  // of ignored modules
  for (const auto& buffer : defined_buffers(*model.module())) {
    show(buffer.key(), model.cast_buffers().own_value(buffer.key(), buffer.value().detach()));
  }
}

}  // namespace tessera::internal
