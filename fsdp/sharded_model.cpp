#include "fsdp/sharded_model.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <set>
#include <stdexcept>
#include <unordered_set>

#include <tessera/host_results.h>
#include "core/comm/group_process.h"
#include "core/layout/deferred.h"
#include "core/layout/shardable.h"
#include "core/memory/memory_cache.h"
#include "core/model/memory_warning.h"
#include "core/model/module_state.h"
#include "core/runtime/no_grad_no_inference_guard.h"
#include "fsdp/checks/plan_checks.h"

namespace tessera::internal {
namespace {

// Compares the hybrid options over ranks, before make_mesh() forms groups that depend on them. Returns `comm`.
std::shared_ptr<Communicator> agreed(std::shared_ptr<Communicator> comm, const FsdpOptions& options) {
  const HybridSharding& hybrid = options.hybrid;
  require_agreement(*comm, "FsdpOptions::hybrid",
                    {"ranks_per_copy=" + std::to_string(hybrid.ranks_per_copy) +
                     " ranks_per_secondary_copy=" + std::to_string(hybrid.ranks_per_secondary_copy)});
  return comm;
}

// Returns the module's parameters that belong to no unit, under all their names.
torch::OrderedDict<std::string, at::Tensor> parameters_beside(const std::vector<PlannedParameter>& planned,
                                                              const torch::nn::Module& module) {
  std::unordered_set<const at::TensorImpl*> known;
  for (const PlannedParameter& parameter : planned) known.insert(parameter.tensor.unsafeGetTensorImpl());
  torch::OrderedDict<std::string, at::Tensor> others;
  for (const auto& parameter : module.named_parameters())
    if (parameter.value().defined() && !known.contains(parameter.value().unsafeGetTensorImpl()))
      others.insert(parameter.key(), parameter.value());
  return others;
}

// Returns a function that restores the module's deferred tensors to their present, deferred state.
auto deferring_again(const torch::nn::Module& module) {
  std::vector<std::pair<at::Tensor, at::Tensor>> deferred;
  for (const auto& list : {module.parameters(), module.buffers()})
    for (const at::Tensor& tensor : list)
      if (is_deferred(tensor)) deferred.emplace_back(tensor, tensor.detach());
  return [deferred = std::move(deferred)] {
    for (const auto& [tensor, as_now] : deferred) fill_deferred(tensor, as_now);
  };
}

}  // namespace

ShardedModel::ShardedModel(torch::nn::Module& module, std::shared_ptr<Communicator> comm, const FsdpOptions& options,
                           Pager* pager)
    : options_(checked(options)),
      mesh_(make_mesh(agreed(std::move(comm), options), options.hybrid.ranks_per_copy,
                      options.hybrid.ranks_per_secondary_copy)),
      module_(module.shared_from_this()),
      // The shard group allocates these buffers, because it gathers into them. The group must outlive the buffers.
      gathered_(
          mesh_.world->device(), MemoryKind::kGathered,
          [shard = mesh_.shard.get()](int64_t numel, at::ScalarType dtype) { return shard->buffer(numel, dtype); }),
      secondary_(mesh_.world->device(), MemoryKind::kSecondary),
      offload_(options.offload, *mesh_.world) {
  NoGradNoInferenceGuard quiet;
  const MixedPrecision& precision = options_.mixed_precision;
  const bool casts = precision.param_dtype || precision.reduce_dtype;
  auto plan = plan_units(module, options_.auto_wrap,
                         {options_.ignored_modules, casts ? exempt_modules(precision) : WrapPolicy()});
  std::vector<PlannedParameter> planned;
  for (const PlannedUnit& unit : plan) planned.insert(planned.end(), unit.parameters.begin(), unit.parameters.end());
  require_shardable(planned, *mesh_.world, "FullyShardedDataParallel", /*may_be_deferred=*/true);
  require_apart(module_->named_buffers(), "buffer", planned, "FullyShardedDataParallel", mesh_.world->rank());
  ignored_parameters_ = parameters_beside(planned, *module_);
  require_apart(ignored_parameters_, "parameter of an ignored module", planned, "FullyShardedDataParallel",
                mesh_.world->rank());
  planned.clear();
  require_same_plan(plan, options_, *module_, *mesh_.world);
  warn_if_short_of_memory("FullyShardedDataParallel", memory_need(plan, options_, mesh_), *mesh_.world);
  warn_of_idle_policies(plan, options_, *module_, *mesh_.world);
  auto undo = c10::make_scope_exit(deferring_again(*module_));  // runs if the constructor throws
  make_units(plan, pager);
  if (options_.sync_module_states) broadcast_tensors(module_->buffers(), *mesh_.world, "the module's buffers");
  if (precision.buffer_dtype) cast_buffers_.cast(*module_, options_);
  name_shards();
  undo.release();
  // The allocators still hold the memory of the module's own parameters, freed above.
  if (mesh_.world->device().is_cpu()) release_freed_memory();
}

// [Note: Allocating offloaded shards first] A unit's values are freed once its shard exists, so a later error would
// lose them. The limits of host and disk memory are the user's choice, and may differ between ranks. So this function
// allocates all offloaded shards before the first parameter changes. If one rank cannot, all ranks throw.
std::vector<FlatParameterOptions> ShardedModel::reserve_shards(const std::vector<PlannedUnit>& plan,
                                                               const FlatParameterOptions& common) {
  std::vector<FlatParameterOptions> options(plan.size(), common);
  if (!options_.offload.params) return options;
  std::exception_ptr failure;
  try {
    for (size_t i = 0; i < plan.size(); ++i) {
      if (offload_.is_kept_on_device(i)) {
        options[i].grad_memory = nullptr;
        continue;
      }
      const auto memory = offload_.shards(plan[i].name), low_precision = offload_.low_precision_shards();
      auto reserved = std::make_shared<std::deque<at::Tensor>>();
      for (auto& parameters : split_into_flat_parameters(plan[i])) {
        const FlatSpec spec("", std::move(parameters), mesh_.shard->rank(), mesh_.shard->size(), common.gather_dtype,
                            common.reduce_dtype);
        reserved->push_back(memory(spec.layout().shard_numel(), spec.dtype()));
        if (spec.is_cast()) reserved->push_back(low_precision(spec.layout().shard_numel(), spec.gather_dtype()));
      }
      options[i].shard_memory = options[i].low_precision_memory = [reserved](int64_t, at::ScalarType) {
        at::Tensor next = std::move(reserved->front());
        reserved->pop_front();
        return next;
      };
    }
  } catch (...) {
    failure = std::current_exception();
  }
  try {
    require_agreement(*mesh_.world, "memory for offloaded shards", {failure ? text_of(failure) : "enough"});
  } catch (const std::invalid_argument&) {
    if (!failure) throw;
  }
  if (failure) std::rethrow_exception(failure);
  return options;
}

// [Note: Sharding a deferred model] Replays the tape of a deferred model batch by batch. When a unit's values are
// computed, makes the unit and frees the values, so memory never holds the whole model. Ranks have equal tapes, so they
// construct units in the same order. A deferred tensor outside units (such as a buffer) is a batch by itself.
void ShardedModel::make_units(std::vector<PlannedUnit>& plan, Pager* pager) {
  const MixedPrecision& precision = options_.mixed_precision;
  FlatParameterOptions flat_options;
  flat_options.gather_dtype = precision.param_dtype;
  flat_options.reduce_dtype = precision.reduce_dtype;
  flat_options.wire = options_.wire.parameters;
  flat_options.replicas = mesh_.replicas.get();
  flat_options.pager = pager;
  flat_options.grad_memory = offload_.gradients();
  offload_.keep_on_device(first_units(plan, options_.offload.device_fraction));
  std::vector<FlatParameterOptions> options = reserve_shards(plan, flat_options);
  units_.resize(plan.size());
  auto make = [&](size_t index) {
    FlatParameterOptions own_options = std::exchange(options[index], {});
    own_options.page_id = static_cast<int>(index);
    const UnitContext context{*mesh_.shard,
                              gathered_,
                              log_,
                              offload_.is_kept_on_device(index) ? ShardSource() : offload_.source(),
                              {mesh_.secondary.get(), &secondary_}};
    units_[index] =
        std::make_unique<Unit>(static_cast<int>(index), plan[index], context, own_options, options_.sync_module_states);
    plan[index].parameters.clear();
  };
  std::vector<std::vector<at::Tensor>> deferred;
  std::vector<std::vector<PlannedParameter*>> receivers;
  std::unordered_set<const c10::TensorImpl*> planned;
  for (PlannedUnit& unit : plan) {
    deferred.emplace_back();
    receivers.emplace_back();
    for (PlannedParameter& parameter : unit.parameters) {
      if (!is_deferred(parameter.tensor)) continue;
      planned.insert(parameter.tensor.unsafeGetTensorImpl());
      if (reader_of(parameter.tensor) != nullptr) continue;  // FlatParameter reads this rank's part later
      deferred.back().push_back(parameter.tensor);
      receivers.back().push_back(&parameter);
    }
  }
  std::vector<at::Tensor> others;
  for (const auto& list : {module_->parameters(), module_->buffers()})
    for (const at::Tensor& tensor : list)
      if (is_deferred(tensor) && planned.insert(tensor.unsafeGetTensorImpl()).second) others.push_back(tensor);
  for (const at::Tensor& tensor : others) deferred.push_back({tensor});

  // A batch without deferred parameters needs no replay. So for an ordinary model, this call is a loop over `plan`.
  replay_deferred(deferred, [&](size_t batch, const std::vector<at::Tensor>& values) {
    if (batch >= plan.size()) return fill_deferred(deferred[batch][0], values[0].to(mesh_.world->device()));
    for (size_t i = 0; i < values.size(); ++i) receivers[batch][i]->values = values[i];
    make(batch);
  });
}

std::vector<PlannedParameter> ShardedModel::parameters() const {
  std::vector<PlannedParameter> parameters;
  for (const auto& unit : units_)
    for (const auto& paged : unit->flat_parameters())
      parameters.insert(parameters.end(), paged->flat.parameters().begin(), paged->flat.parameters().end());
  return parameters;
}

std::vector<Unit*> ShardedModel::units_named(const std::vector<std::string>& names) const {
  std::vector<Unit*> chosen;
  std::set<std::string> unknown(names.begin(), names.end());
  std::string known;
  for (const auto& unit : units_) {
    const std::string& name = unit->plan_name();
    known += (known.empty() ? "'" : ", '") + name + "'";
    unknown.erase(name);
    if (names.empty() || std::ranges::find(names, name) != names.end()) chosen.push_back(unit.get());
  }
  if (!unknown.empty())
    throw std::invalid_argument("SummonOptions::units: there is no unit '" + *unknown.begin() + "'; the units are " +
                                known);
  return chosen;
}

}  // namespace tessera::internal
