// Functions of ShardedModel for checkpoints, state dictionaries and reports.
#include "fsdp/sharded_model.h"

#include <algorithm>
#include <map>
#include <unordered_set>

namespace tessera::internal {

void ShardedModel::name_shards() {
  std::map<std::string, std::pair<NamedShard, InLayout>> by_name;
  for (auto& unit : units_) {
    for (auto& paged : unit->flat_parameters()) {
      FlatParameter& flat = paged->flat;
      for (size_t i = 0; i < flat.parameters().size(); ++i) {
        const PlannedParameter& parameter = flat.parameters()[i];
        const auto index = static_cast<int64_t>(i);
        by_name[parameter.fqn] = {
            {parameter.fqn, parameter.aliases, flat.geometry(i).sizes, flat.geometry(i).strides,
             flat.layout().owned(index, mesh_.shard->rank()), flat.parameter_shards()[i], mesh_.copy(), mesh_.copies()},
            {&flat.layout(), index}};
      }
    }
  }
  for (const auto& parameter : module_->named_parameters()) {
    const auto found = by_name.find(parameter.key());
    if (found == by_name.end()) continue;  // an alias, or a parameter of an ignored module
    named_shards_.push_back(found->second.first);
    in_layouts_.push_back(found->second.second);
  }
}

// Relies on make_mesh(), which assigns consecutive ranks to each copy of the model.
std::vector<ModelShards::HeldPart> ShardedModel::held_by(int rank) const {
  const int ranks = mesh_.shard->size();
  std::vector<ModelShards::HeldPart> held;
  for (const auto& [layout, parameter] : in_layouts_)
    held.push_back({layout->owned(parameter, rank % ranks), rank / ranks});
  return held;
}

MemoryReport ShardedModel::memory() const {
  MemoryReport report;
  for (const auto& unit : units_) {
    report.largest_unit_bytes = std::max(report.largest_unit_bytes, unit->full_bytes());
    for (const auto& paged : unit->flat_parameters()) {
      report.shard_bytes += paged->flat.shard_bytes();
      report.grad_bytes += paged->flat.gradient().bytes();
      report.unsharded_bytes += paged->flat.unsharded_bytes();
      if (!options_.offload.params || offload_.is_kept_on_device(unit->index()))
        report.device_bytes += paged->flat.shard_bytes();
      if (!offloads_gradients(*unit)) report.device_bytes += paged->flat.gradient().bytes();
    }
  }
  report.gathered_bytes = gathered_.lent_bytes();
  report.peak_gathered_bytes = gathered_.peak_lent_bytes();
  report.secondary_bytes = secondary_.lent_bytes();
  report.peak_secondary_bytes = secondary_.peak_lent_bytes();
  offload_.report(report);
  report.device_bytes += report.gathered_bytes + report.secondary_bytes + report.staging_bytes;
  return report;
}

void ShardedModel::visit_full_state(const VisitState& visit, const StateDictOptions& options) {
  const bool keep = !options.rank0_only || mesh_.world->rank() == 0;
  std::unordered_set<std::string> sharded;
  auto show = [&](const std::string& name, const at::Tensor& tensor, const std::vector<std::string>& aliases = {}) {
    if (keep) visit(name, aliases, options.offload_to_cpu ? tensor.cpu() : tensor);
  };
  // Throws if an all-gather was aborted, so that `visit` receives no invalid values.
  auto settle = [&] {
    if (keep) mesh_.world->throw_if_aborted("full_state_dict");
  };
  for (auto& unit : units_) {
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
  for (const auto& parameter : module_->named_parameters())
    if (!sharded.contains(parameter.key())) show(parameter.key(), parameter.value().detach());  // of an ignored module
  for (const auto& buffer : defined_buffers(*module_)) {
    show(buffer.key(), cast_buffers_.own_value(buffer.key(), buffer.value().detach()));
  }
}

void ShardedModel::reset_peak_memory() {
  gathered_.reset_peak();
  secondary_.reset_peak();
  offload_.staging().reset_peak();
}

void ShardedModel::describe(std::ostream& text) const {
  text << units_.size() << " units over " << mesh_.shard->size() << " ranks";
  if (mesh_.replicas) text << ", " << mesh_.copies() << " copies";
  if (mesh_.secondary) text << ", gathered again from " << mesh_.secondary->size();
  text << "\n";
  for (const auto& unit : units_) {
    for (const auto& paged : unit->flat_parameters()) {
      const FlatParameter& flat = paged->flat;
      text << "  " << flat.name() << ": " << flat.parameters().size() << " parameters, "
           << flat.layout().parameters_numel() << " elements of " << c10::toString(flat.dtype()) << ", "
           << flat.full_bytes() << " bytes gathered";
      if (flat.is_cast()) text << " as " << c10::toString(flat.gather_dtype());
      text << ", " << flat.shard_bytes() << " bytes on each rank";
      if (flat.reduce_dtype() != flat.dtype()) text << ", gradients reduced as " << c10::toString(flat.reduce_dtype());
      text << "\n";
    }
  }
}

}  // namespace tessera::internal
