#include "tessera/fsdp/sharded_model.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>

#include "tessera/comm/agreement.h"
#include "tessera/flat/deferred.h"
#include "tessera/flat/module_sync.h"
#include "tessera/flat/quiet.h"
#include "tessera/flat/shardable.h"
#include "tessera/memory/memory_cache.h"

namespace tessera {
namespace {

std::string name_of(std::optional<at::ScalarType> dtype) { return dtype ? c10::toString(*dtype) : "own"; }

void check_dtype(const char* field, std::optional<at::ScalarType> dtype) {
  if (dtype && !at::isFloatingType(*dtype))
    throw std::invalid_argument(std::string("FsdpOptions::mixed_precision.") + field + " is " + c10::toString(*dtype) +
                                ", expected a floating-point type");
}

void check_options(const FsdpOptions& options) {
  check_dtype("param_dtype", options.mixed_precision.param_dtype);
  check_dtype("reduce_dtype", options.mixed_precision.reduce_dtype);
  check_dtype("buffer_dtype", options.mixed_precision.buffer_dtype);
  check_dtype("output_dtype", options.mixed_precision.output_dtype);
  if (options.offload.host_limit_bytes < 0)
    throw std::invalid_argument("FsdpOptions::offload.host_limit_bytes is " +
                                std::to_string(options.offload.host_limit_bytes) + ", expected 0 or more");
  if (!options.offload.directory.empty() && !options.offload.params)
    throw std::invalid_argument("FsdpOptions::offload.directory is '" + options.offload.directory +
                                "', but offload.params is false: shards that stay on the device cannot lie on a disk");
  if (options.prefetch < 0)
    throw std::invalid_argument("FsdpOptions::prefetch is " + std::to_string(options.prefetch) +
                                ", expected 0 or more");
  if (options.keep_recent < 1)
    throw std::invalid_argument("FsdpOptions::keep_recent is " + std::to_string(options.keep_recent) +
                                ", expected 1 or more");
}

bool offloads(const FsdpOptions& options) { return options.offload.params || options.offload.grads; }

void check_offload(const FsdpOptions& options, at::Device device) {
  if (!device.is_cpu() && options.offload.params != options.offload.grads)
    throw std::invalid_argument(std::string("FsdpOptions::offload has params = ") +
                                (options.offload.params ? "true" : "false") +
                                " and grads = " + (options.offload.grads ? "true" : "false") + " on " + device.str() +
                                ", expected both or neither: an optimizer needs parameters and gradients in one place");
}

// The groups are made before the plan is known, and differ where the ranks do not agree on them.
std::shared_ptr<Communicator> agreed(std::shared_ptr<Communicator> comm, const FsdpOptions& options) {
  require_agreement(*comm, "FsdpOptions::hybrid", {"ranks_per_copy=" + std::to_string(options.hybrid.ranks_per_copy)});
  return comm;
}

}  // namespace

// ---- construction -------------------------------------------------------------------------------

ShardedModel::ShardedModel(torch::nn::Module& module, std::shared_ptr<Communicator> comm, const FsdpOptions& options,
                           Pager* pager)
    : options_((check_options(options), options)),
      mesh_(make_mesh(agreed(std::move(comm), options), options.hybrid.ranks_per_copy)),
      module_(module.shared_from_this()),
      gathered_(mesh_.world->device()),
      staging_(mesh_.world->device()),
      host_({mesh_.world->device(), options.offload.pin_memory, options.offload.host_limit_bytes}) {
  Quiet quiet;
  check_offload(options_, mesh_.world->device());
  if (!options_.offload.directory.empty())
    disk_ =
        std::make_unique<DiskPager>(DiskPagerOptions{options_.offload.directory, options_.offload.disk_buffer_bytes});
  if (offloads(options_)) copies_ = CopyEngine::make(mesh_.world->device());
  const MixedPrecision& precision = options_.mixed_precision;
  const bool casts = precision.param_dtype || precision.reduce_dtype;
  auto plan = plan_units(module, options_.auto_wrap,
                         {options_.ignored_modules, casts ? precision.full_precision : WrapPolicy()});
  std::vector<PlannedParameter> planned;
  for (const PlannedUnit& unit : plan) planned.insert(planned.end(), unit.parameters.begin(), unit.parameters.end());
  require_shardable(planned, *mesh_.world, "FullyShardedDataParallel", /*may_be_deferred=*/true);
  planned.clear();
  check_agreement(plan);
  make_units(plan, pager);
  if (options_.sync_module_states) broadcast_tensors(module_->buffers(), *mesh_.world, "the module's buffers");
  if (precision.buffer_dtype) cast_buffers();
  name_shards();
  // The module's own parameters were freed unit by unit.
  if (mesh_.world->device().is_cpu()) release_freed_memory();
}

// A unit with deferred parameters is made as soon as its values are there, and frees them; the tape is
// the same on all ranks, and so the order. Deferred tensors that are in no unit (buffers, ignored
// parameters) are filled as they come.
void ShardedModel::make_units(std::vector<PlannedUnit>& plan, Pager* pager) {
  const MixedPrecision& precision = options_.mixed_precision;
  FlatGroupOptions group_options;
  group_options.gather_dtype = precision.param_dtype;
  group_options.reduce_dtype = precision.reduce_dtype;
  group_options.replicas = mesh_.replicas.get();
  group_options.pager = pager;
  if (options_.offload.grads) group_options.grad_memory = host_memory("gradients");
  if (options_.offload.params) group_options.narrow_memory = host_memory("the shards in 16 bit");
  const ShardSource source = options_.offload.params ? ShardSource{copies_.get(), &staging_} : ShardSource{};
  units_.resize(plan.size());
  auto make = [&](size_t index) {
    FlatGroupOptions own_options = group_options;
    own_options.shard_memory = shard_memory(plan[index].name);
    own_options.page_id = static_cast<int>(index);
    units_[index] = std::make_unique<Unit>(static_cast<int>(index), plan[index], *mesh_.shard, own_options, gathered_,
                                           log_, options_.sync_module_states, source);
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
      deferred.back().push_back(parameter.tensor);
      receivers.back().push_back(&parameter);
    }
  }
  std::vector<at::Tensor> others;
  for (const auto& list : {module_->parameters(), module_->buffers()})
    for (const at::Tensor& tensor : list)
      if (is_deferred(tensor) && planned.insert(tensor.unsafeGetTensorImpl()).second) others.push_back(tensor);
  for (const at::Tensor& tensor : others) deferred.push_back({tensor});

  // Without deferred parameters in it, a group is ready at once: the loop over the plan, in order.
  replay_deferred(deferred, [&](size_t group, const std::vector<at::Tensor>& values) {
    if (group >= plan.size()) return fill_deferred(deferred[group][0], values[0].to(mesh_.world->device()));
    for (size_t i = 0; i < values.size(); ++i) receivers[group][i]->values = values[i];
    make(group);
  });
}

FlatGroupOptions::Memory ShardedModel::host_memory(const char* purpose) {
  return [this, purpose](int64_t numel, at::ScalarType dtype) {
    return host_.take(numel, dtype, std::string(purpose) + " on rank " + std::to_string(mesh_.world->rank()));
  };
}

FlatGroupOptions::Memory ShardedModel::shard_memory(const std::string& unit) {
  if (!options_.offload.params) return nullptr;
  if (!disk_ || (options_.offload.disk_units && !options_.offload.disk_units(unit))) return host_memory("the shards");
  return [this, unit](int64_t numel, at::ScalarType dtype) {
    return disk_->make({numel}, {1}, dtype,
                       "the shard of unit '" + unit + "' on rank " + std::to_string(mesh_.world->rank()));
  };
}

void ShardedModel::check_agreement(const std::vector<PlannedUnit>& plan) const {
  std::vector<std::string> lines;
  std::ostringstream options;
  options << "options: reshard_after_forward=" << options_.reshard_after_forward << " prefetch=" << options_.prefetch
          << " keep_recent=" << options_.keep_recent << " sync_module_states=" << options_.sync_module_states
          << " param_dtype=" << name_of(options_.mixed_precision.param_dtype)
          << " reduce_dtype=" << name_of(options_.mixed_precision.reduce_dtype)
          << " buffer_dtype=" << name_of(options_.mixed_precision.buffer_dtype)
          << " refuse_uneven_use=" << options_.refuse_uneven_use << " check_finite=" << options_.check_finite
          << " offload.params=" << options_.offload.params << " offload.grads=" << options_.offload.grads
          << " offload.disk=" << !options_.offload.directory.empty();
  lines.push_back(options.str());
  for (const PlannedUnit& unit : plan)
    for (const std::string& line : describe_parameters(unit.parameters))
      lines.push_back("unit '" + unit.name + "': " + line);
  for (std::string& line : describe_buffers(*module_)) lines.push_back(std::move(line));
  require_agreement(*mesh_.world, "the module to shard", lines);
}

// In place: the module's members are these very tensors.
void ShardedModel::cast_buffers() {
  const auto exempt = modules_below(*module_, options_.mixed_precision.full_precision);
  const auto ignored = modules_below(*module_, options_.ignored_modules);
  for (const auto& module : module_->named_modules()) {
    if (exempt.contains(module.value().get()) || ignored.contains(module.value().get())) continue;
    for (const auto& entry : module.value()->named_buffers(/*recurse=*/false)) {
      at::Tensor buffer = entry.value();
      if (!buffer.defined() || !at::isFloatingType(buffer.scalar_type())) continue;
      const std::string name = module.key().empty() ? entry.key() : module.key() + "." + entry.key();
      cast_buffers_.emplace(name, buffer.scalar_type());
      buffer.set_data(buffer.to(*options_.mixed_precision.buffer_dtype));
    }
  }
}

void ShardedModel::name_shards() {
  std::map<std::string, NamedShard> by_name;
  for (auto& unit : units_) {
    for (auto& group : unit->groups()) {
      FlatGroup& flat = group->flat;
      for (size_t i = 0; i < flat.parameters().size(); ++i) {
        const PlannedParameter& parameter = flat.parameters()[i];
        by_name[parameter.fqn] = {parameter.fqn,
                                  parameter.aliases,
                                  flat.geometry(i).sizes,
                                  flat.geometry(i).strides,
                                  flat.layout().owned(static_cast<int64_t>(i), mesh_.shard->rank()),
                                  flat.parameter_shards()[i],
                                  mesh_.copy(),
                                  mesh_.copies()};
      }
    }
  }
  for (const auto& parameter : module_->named_parameters()) {
    const auto found = by_name.find(parameter.key());  // not there: an alias of one that is
    if (found != by_name.end()) named_shards_.push_back(found->second);
  }
}

// ---- state --------------------------------------------------------------------------------------

void ShardedModel::visit_full_state(const VisitState& visit, const StateDictOptions& options) {
  const bool keep = !options.rank0_only || mesh_.world->rank() == 0;
  std::unordered_set<std::string> sharded;
  auto show = [&](const std::string& name, const at::Tensor& tensor, const std::vector<std::string>& aliases = {}) {
    if (keep) visit(name, aliases, options.offload_to_cpu ? tensor.cpu() : tensor);
  };
  for (auto& unit : units_) {
    for (auto& group : unit->groups()) {
      const FlatGroup& flat = group->flat;
      at::Tensor full = unit->pinned_values(*group);
      if (!full.defined()) {
        full = gathered_.take(flat.layout().full_numel(), flat.dtype());
        log_.add("all-gather", flat.name(), full.numel());
        flat.gather(full, *mesh_.shard).wait();
      }
      for (size_t i = 0; i < flat.parameters().size(); ++i) {
        const PlannedParameter& parameter = flat.parameters()[i];
        sharded.insert(parameter.fqn);
        sharded.insert(parameter.aliases.begin(), parameter.aliases.end());
        show(parameter.fqn, flat.view_in(full, i), parameter.aliases);
      }
    }
  }
  for (const auto& parameter : module_->named_parameters())
    if (!sharded.contains(parameter.key())) show(parameter.key(), parameter.value().detach());  // ignored
  for (const auto& buffer : named_buffers()) {
    const auto cast = cast_buffers_.find(buffer.key());
    show(buffer.key(),
         cast == cast_buffers_.end() ? buffer.value().detach() : buffer.value().detach().to(cast->second));
  }
}

torch::OrderedDict<std::string, at::Tensor> ShardedModel::full_state_dict(const StateDictOptions& options) {
  std::unordered_map<std::string, at::Tensor> by_name;
  visit_full_state(
      [&](const std::string& name, const std::vector<std::string>& aliases, const at::Tensor& tensor) {
        by_name[name] = tensor.clone();
        for (const std::string& alias : aliases) by_name[alias] = by_name[name];
      },
      options);
  torch::OrderedDict<std::string, at::Tensor> state;
  if (by_name.empty()) return state;
  // In the module's order, as state dictionaries are.
  for (const auto& parameter : module_->named_parameters()) state.insert(parameter.key(), by_name.at(parameter.key()));
  for (const auto& buffer : named_buffers()) state.insert(buffer.key(), by_name.at(buffer.key()));
  return state;
}

torch::OrderedDict<std::string, at::Tensor> ShardedModel::named_buffers() const {
  torch::OrderedDict<std::string, at::Tensor> buffers;
  for (const auto& buffer : module_->named_buffers())
    if (buffer.value().defined()) buffers.insert(buffer.key(), buffer.value());
  return buffers;
}

// ---- reports ------------------------------------------------------------------------------------

MemoryReport ShardedModel::memory() const {
  MemoryReport report;
  for (const auto& unit : units_) {
    report.largest_unit_bytes = std::max(report.largest_unit_bytes, unit->full_bytes());
    for (const auto& group : unit->groups()) {
      report.shard_bytes += group->flat.shard_bytes();
      report.grad_bytes += group->flat.gradient().bytes();
      report.unsharded_bytes += group->flat.unsharded_bytes();
    }
  }
  report.gathered_bytes = gathered_.lent_bytes();
  report.peak_gathered_bytes = gathered_.peak_lent_bytes();
  report.staging_bytes = staging_.lent_bytes();
  report.peak_staging_bytes = staging_.peak_lent_bytes();
  report.device_bytes = report.gathered_bytes + report.staging_bytes +
                        (options_.offload.params ? 0 : report.shard_bytes) +
                        (options_.offload.grads ? 0 : report.grad_bytes);
  report.host_bytes = host_.lent_bytes();
  report.pinned_bytes = options_.offload.pin_memory ? report.host_bytes : 0;
  if (disk_) {
    report.host_bytes += disk_->buffer_bytes();
    report.disk_bytes = disk_->disk_bytes();
  }
  return report;
}

std::vector<PlannedParameter> ShardedModel::parameters() const {
  std::vector<PlannedParameter> parameters;
  for (const auto& unit : units_)
    for (const auto& group : unit->groups())
      parameters.insert(parameters.end(), group->flat.parameters().begin(), group->flat.parameters().end());
  return parameters;
}

std::vector<Unit*> ShardedModel::units_named(const std::vector<std::string>& names) const {
  std::vector<Unit*> chosen;
  std::string known;
  for (const auto& unit : units_) {
    known += (known.empty() ? "'" : ", '") + unit->plan_name() + "'";
    if (names.empty() || std::find(names.begin(), names.end(), unit->plan_name()) != names.end())
      chosen.push_back(unit.get());
  }
  if (!names.empty() && chosen.size() != names.size())
    throw std::invalid_argument("SummonOptions::units names " + std::to_string(names.size()) + " units, of which " +
                                std::to_string(chosen.size()) + " exist; they are: " + known);
  return chosen;
}

void ShardedModel::reset_peak_memory() {
  gathered_.reset_peak();
  staging_.reset_peak();
}

void ShardedModel::describe(std::ostream& text) const {
  text << units_.size() << " units over " << mesh_.shard->size() << " ranks";
  if (mesh_.replicas) text << ", " << mesh_.copies() << " copies";
  text << "\n";
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups()) {
      const FlatGroup& flat = group->flat;
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

}  // namespace tessera
