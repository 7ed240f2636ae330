#include "tessera/fsdp/fsdp_runtime.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>

#include "tessera/comm/agreement.h"
#include "tessera/flat/deferred.h"
#include "tessera/flat/gradient_hook.h"
#include "tessera/flat/module_sync.h"
#include "tessera/flat/shard_norm.h"
#include "tessera/flat/unit_plan.h"

namespace tessera {
namespace {

std::string name_of(std::optional<at::ScalarType> dtype) { return dtype ? c10::toString(*dtype) : "own"; }

// The fallback may run under InferenceMode or in a recorded forward; what the runtime does to its
// own tensors must be neither inference tensors nor recorded.
struct Quiet {
  c10::InferenceMode ordinary{false};
  at::NoGradGuard no_grad;
};

bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

void check_parameter(const PlannedParameter& parameter, const Communicator& comm) {
  std::ostringstream problem;
  const at::Tensor& tensor = parameter.tensor;
  if (is_paged(tensor)) {
    problem << "is sharded already by another wrapper";
  } else if (tensor.layout() != at::kStrided) {
    problem << "has layout " << tensor.layout() << ", expected a dense one";
  } else if (is_deferred(tensor)) {
    // Filled when its unit is made.
  } else if (tensor.device() != comm.device()) {
    problem << "is on " << tensor.device() << ", expected the communicator's device, " << comm.device();
  } else if (!tensor.is_leaf()) {
    problem << "is the result of an operation, expected a leaf";
  }
  if (!problem.str().empty())
    throw std::invalid_argument("parameter '" + parameter.fqn + "' on rank " + std::to_string(comm.rank()) + " " +
                                problem.str());
}

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

// ---- construction ------------------------------------------------------------------------------

std::shared_ptr<FsdpRuntime> FsdpRuntime::wrap(torch::nn::Module& module, std::shared_ptr<Communicator> comm,
                                               const FsdpOptions& options) {
  if (!comm) throw std::invalid_argument("FullyShardedDataParallel: the communicator is null");
  require_residency();
  std::shared_ptr<FsdpRuntime> runtime(new FsdpRuntime(module, std::move(comm), options));
  for (auto& unit : runtime->units_) runtime->install_hooks(*unit);  // the hooks refer to the shared object
  return runtime;
}

FsdpRuntime::FsdpRuntime(torch::nn::Module& module, std::shared_ptr<Communicator> comm, const FsdpOptions& options)
    : options_((check_options(options), options)),
      groups_(make_sharding_groups(agreed(std::move(comm), options), options.hybrid.ranks_per_copy)),
      module_(module.shared_from_this()),
      gathered_(groups_.world->device()),
      staging_(groups_.world->device()),
      host_({groups_.world->device(), options.offload.pin_memory, options.offload.host_limit_bytes}) {
  Quiet quiet;
  check_offload(options_, groups_.world->device());
  if (!options_.offload.directory.empty())
    disk_ =
        std::make_unique<DiskPager>(DiskPagerOptions{options_.offload.directory, options_.offload.disk_buffer_bytes});
  if (offloads(options_)) copies_ = CopyEngine::make(groups_.world->device());
  const MixedPrecision& precision = options_.mixed_precision;
  const bool casts = precision.param_dtype || precision.reduce_dtype;
  auto plan = plan_units(module, options_.auto_wrap,
                         {options_.ignored_modules, casts ? precision.full_precision : WrapPolicy()});
  for (const PlannedUnit& unit : plan)
    for (const PlannedParameter& parameter : unit.parameters) check_parameter(parameter, *groups_.world);
  check_agreement(plan);
  make_units(plan);
  if (options_.sync_module_states) broadcast_tensors(module_->buffers(), *groups_.world, "the module's buffers");
  if (precision.buffer_dtype) cast_buffers();
  reducer_ = std::make_unique<GradientReducer>(
      groups_, units_, log_, ReducerChecks{options_.refuse_uneven_use, options_.check_finite},
      options_.offload.grads ? GradientSink{copies_.get(), &staging_} : GradientSink{});
  name_shards();
  gathered_.trim();  // the module's own parameters were freed unit by unit
}

// A unit with deferred parameters is made as soon as its values are there, and frees them; the tape is
// the same on all ranks, and so the order. Deferred tensors that are in no unit (buffers, ignored
// parameters) are filled as they come.
void FsdpRuntime::make_units(std::vector<PlannedUnit>& plan) {
  const MixedPrecision& precision = options_.mixed_precision;
  const FlatGroupOptions group_options{precision.param_dtype,
                                       precision.reduce_dtype,
                                       groups_.replicas.get(),
                                       /*shard_memory=*/nullptr,
                                       options_.offload.grads ? host_memory("gradients") : nullptr,
                                       options_.offload.params ? host_memory("the shards in 16 bit") : nullptr};
  const ShardSource source = options_.offload.params ? ShardSource{copies_.get(), &staging_} : ShardSource{};
  units_.resize(plan.size());
  auto make = [&](size_t index) {
    FlatGroupOptions own_options = group_options;
    own_options.shard_memory = shard_memory(plan[index].name);
    units_[index] = std::make_unique<Unit>(static_cast<int>(index), plan[index], *groups_.shard, own_options, gathered_,
                                           this, log_, options_.sync_module_states, source);
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
    if (group >= plan.size()) return fill_deferred(deferred[group][0], values[0].to(groups_.world->device()));
    for (size_t i = 0; i < values.size(); ++i) receivers[group][i]->values = values[i];
    make(group);
  });
}

FlatGroupOptions::Memory FsdpRuntime::host_memory(const char* purpose) {
  return [this, purpose](int64_t numel, at::ScalarType dtype) {
    return host_.take(numel, dtype, std::string(purpose) + " on rank " + std::to_string(groups_.world->rank()));
  };
}

FlatGroupOptions::Memory FsdpRuntime::shard_memory(const std::string& unit) {
  if (!options_.offload.params) return nullptr;
  if (!disk_ || (options_.offload.disk_units && !options_.offload.disk_units(unit))) return host_memory("the shards");
  return [this, unit](int64_t numel, at::ScalarType dtype) {
    return disk_->make({numel}, {1}, dtype,
                       "the shard of unit '" + unit + "' on rank " + std::to_string(groups_.world->rank()));
  };
}

void FsdpRuntime::check_agreement(const std::vector<PlannedUnit>& plan) const {
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
  require_agreement(*groups_.world, "the module to shard", lines);
}

// In place: the module's members are these very tensors.
void FsdpRuntime::cast_buffers() {
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

void FsdpRuntime::name_shards() {
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
                                  flat.layout().owned(static_cast<int64_t>(i), groups_.shard->rank()),
                                  flat.parameter_shards()[i],
                                  groups_.copy(),
                                  groups_.copies()};
      }
    }
  }
  for (const auto& parameter : module_->named_parameters()) {
    const auto found = by_name.find(parameter.key());  // not there: an alias of one that is
    if (found != by_name.end()) named_shards_.push_back(found->second);
  }
}

void FsdpRuntime::install_hooks(Unit& unit) {
  at::AutoGradMode recording(true);
  for (size_t g = 0; g < unit.groups().size(); ++g) {
    PagedGroup& group = *unit.groups()[g];
    for (size_t p = 0; p < group.accumulators.size(); ++p) {
      const at::Tensor& parameter = group.flat.parameters()[p].tensor;
      if (!parameter.requires_grad() || group.accumulators[p]) continue;
      auto take = [weak = weak_from_this(), index = unit.index(), g, p](const at::Tensor& gradient) {
        auto runtime = weak.lock();
        if (!runtime) throw std::logic_error("a gradient for a FullyShardedDataParallel that no longer exists");
        runtime->gradient_arrived(index, g, p, gradient);
        return at::Tensor();  // nothing is left for the module's own parameter
      };
      group.accumulators[p] = torch::autograd::impl::grad_accumulator(parameter);
      group.accumulators[p]->add_pre_hook(std::make_unique<GradientHook>(std::move(take)));
    }
  }
}

// ---- events ------------------------------------------------------------------------------------

void FsdpRuntime::use(const std::vector<Page*>& pages) {
  std::lock_guard lock(mutex_);
  const Page::Use mode = mode_of_use();
  Quiet quiet;
  trace_compute_ends();
  std::vector<Unit*> needed;
  for (Page* page : pages) {
    if (page->id() < 0)
      throw std::logic_error(
          "the gradients of the module's own parameters (here of " + page->name() +
          ") are in the wrapper's shards: build optimizers from fsdp.parameters(), after wrapping, and "
          "clip with fsdp.clip_grad_norm_()");
    Unit* unit = units_[page->id()].get();
    if (std::find(needed.begin(), needed.end(), unit) == needed.end()) needed.push_back(unit);
  }
  if (summoned_elsewhere_)
    throw std::logic_error("a parameter of " + needed[0]->name() + " is used on rank " +
                           std::to_string(groups_.world->rank()) +
                           " while full parameters are summoned on rank 0 only");
  const bool backward = inside_backward();
  if (backward) {
    enter_backward();
  } else {
    if (in_backward_) abandon_backward();
    if (std::exchange(forward_is_new_, false)) forward_order_.begin_pass();
    for (Unit* unit : needed)
      if (unit->inspect_parameters()) install_hooks(*unit);
  }
  if (mode == Page::Use::kRecording)
    for (Unit* unit : needed) reducer_->expect(*unit);

  PrefetchOrder& order = backward ? backward_order_ : forward_order_;
  make_resident(needed);
  for (Unit* unit : needed) order.used(unit->index());
  prefetch(order);

  for (Unit* unit : current_) unit->set_current(Page::Use::kNone);
  current_ = needed;
  for (Unit* unit : needed) unit->set_current(mode);
  trace_compute(needed);
}

// A unit computes from its use on until another's, or the end of the pass; waits for gradients of
// others lie within.
void FsdpRuntime::trace_compute(const std::vector<Unit*>& units) {
  if (Trace::active() == nullptr) return;
  for (const Unit* unit : units) computing_ += (computing_.empty() ? "" : ", ") + unit->name();
  computing_since_ = Trace::Clock::now();
}

void FsdpRuntime::trace_compute_ends() {
  if (computing_.empty()) return;
  Trace::active()->add(SpanKind::kCompute, computing_, inside_backward() ? "backward" : "forward", computing_since_,
                       Trace::Clock::now());
  computing_.clear();
}

void FsdpRuntime::make_resident(const std::vector<Unit*>& needed) {
  for (Unit* unit : needed)
    if (unit->is_stale() && unit->state() != Unit::State::kSharded && !unit->is_pinned()) release(*unit);
  evict_for(needed);
  for (Unit* unit : needed) unit->start_gather();
  for (Unit* unit : needed) unit->finish_gather();
  for (Unit* unit : needed) recent_.push_back(unit);
}

void FsdpRuntime::evict_for(const std::vector<Unit*>& needed) {
  std::erase_if(recent_, [&](Unit* unit) { return std::find(needed.begin(), needed.end(), unit) != needed.end(); });
  if (!options_.reshard_after_forward) return;  // each goes when backward has all its gradients
  while (!recent_.empty() && recent_.size() + needed.size() > static_cast<size_t>(options_.keep_recent))
    release(*recent_.front());
}

void FsdpRuntime::prefetch(const PrefetchOrder& order) {
  if (disk_)
    for (int index : order.upcoming(options_.prefetch + 2)) units_[index]->read_ahead();
  if (options_.offload.params)  // the nearest first, so that its copy is not behind another's
    for (int index : order.upcoming(options_.prefetch + 1)) units_[index]->start_fetch();
  for (int index : order.upcoming(options_.prefetch)) units_[index]->start_gather();
}

void FsdpRuntime::release(Unit& unit) {
  std::erase(recent_, &unit);
  if (!unit.is_pinned()) unit.release();
}

void FsdpRuntime::release_all() {
  for (auto& unit : units_) release(*unit);
  for (auto& unit : units_) unit->set_current(Page::Use::kNone);
  current_.clear();
  recent_.clear();
}

void FsdpRuntime::gradient_arrived(int unit_index, size_t group, size_t parameter, const at::Tensor& gradient) {
  std::lock_guard lock(mutex_);
  Unit& unit = *units_[unit_index];
  if (c10::GradMode::is_enabled())
    throw std::logic_error("backward with create_graph=true reached parameter '" +
                           unit.groups()[group]->flat.parameters()[parameter].fqn +
                           "': gradients of sharded parameters cannot be differentiated again");
  Quiet quiet;
  enter_backward();
  const bool complete = reducer_->add(unit, group, parameter, gradient, sync_);
  if (complete) release(unit);
}

void FsdpRuntime::enter_backward() {
  if (std::exchange(in_backward_, true)) return;
  if (backward_order_.expected().empty()) {
    std::vector<int> reversed(forward_order_.seen().rbegin(), forward_order_.seen().rend());
    backward_order_.expect(std::move(reversed));
  }
  backward_order_.begin_pass();
  reducer_->begin_backward();
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (auto runtime = weak.lock()) runtime->end_backward();
  });
}

void FsdpRuntime::end_backward() {
  std::lock_guard lock(mutex_);
  Quiet quiet;
  trace_compute_ends();
  in_backward_ = false;
  forward_is_new_ = true;
  if (!sync_) {
    reducer_->end_without_reducing();
    return release_all();
  }
  try {
    reducer_->finish();
  } catch (const CommError&) {
    throw;  // nothing can be waited for any more
  } catch (const std::exception&) {
    reducer_->abandon();
    release_all();
    throw;
  }
  release_all();
  // The optimizer makes its state after the first backward: until then the pools held what its first
  // step needs besides.
  if (std::exchange(first_backward_, false)) {
    gathered_.trim();
    staging_.trim();
    reducer_->trim();
  }
}

// The last backward ended in an exception, so that the engine did not call end_backward().
void FsdpRuntime::abandon_backward() {
  in_backward_ = false;
  forward_is_new_ = true;
  reducer_->abandon();
  release_all();
}

void FsdpRuntime::begin_forward() {
  std::lock_guard lock(mutex_);
  if (inside_backward()) return;  // a checkpointed part is computed again
  Quiet quiet;
  trace_compute_ends();
  if (in_backward_) abandon_backward();
  forward_order_.begin_pass();
  forward_is_new_ = false;
  for (Unit* unit : current_) unit->set_current(Page::Use::kNone);
  current_.clear();
  // Prefetched for a pass that took another way.
  for (auto& unit : units_)
    if (unit->state() == Unit::State::kGathering || unit->state() == Unit::State::kFetching) release(*unit);
}

// ---- scopes ------------------------------------------------------------------------------------

void FsdpRuntime::require_outside_backward(const char* call) const {
  if (inside_backward()) throw std::logic_error(std::string(call) + " inside a backward pass");
}

void FsdpRuntime::set_sync(bool sync) {
  std::lock_guard lock(mutex_);
  require_outside_backward("no_sync");
  sync_ = sync;
}

void FsdpRuntime::observe_gradients(GradientReducer::Observer observer) {
  std::lock_guard lock(mutex_);
  require_outside_backward("on_gradients");
  if (observer && reducer_->has_observer())
    throw std::logic_error("on_gradients: somebody is told about gradients already");
  if (observer && options_.check_finite)
    throw std::invalid_argument(
        "on_gradients with FsdpOptions::check_finite: the check comes at the end of backward, when "
        "steps have been taken already");
  reducer_->set_observer(std::move(observer));
}

void FsdpRuntime::summon(const SummonOptions& options) {
  std::lock_guard lock(mutex_);
  require_outside_backward("summon_full_params");
  if (summoned_) throw std::logic_error("summon_full_params inside another summon_full_params");
  if (options.rank0_only && options.writeback)
    throw std::invalid_argument("SummonOptions::rank0_only and writeback are both true, expected writeback = false");
  if (options.offload_to_cpu && !groups_.world->device().is_cpu())
    throw std::invalid_argument("SummonOptions::offload_to_cpu is true on " + groups_.world->device().str() +
                                ": not built yet, expected false");
  std::vector<Unit*> chosen;
  for (auto& unit : units_)
    if (options.units.empty() ||
        std::find(options.units.begin(), options.units.end(), unit->plan_name()) != options.units.end())
      chosen.push_back(unit.get());
  if (!options.units.empty() && chosen.size() != options.units.size())
    throw std::invalid_argument("SummonOptions::units names " + std::to_string(options.units.size()) +
                                " units, of which " + std::to_string(chosen.size()) +
                                " exist; they are: " + unit_names());
  Quiet quiet;
  if (in_backward_) abandon_backward();
  release_all();
  summoned_elsewhere_ = options.rank0_only && groups_.world->rank() != 0;
  for (Unit* unit : chosen) summoned_elsewhere_ ? unit->help_to_pin() : unit->pin();
  summoned_ = true;
}

std::string FsdpRuntime::unit_names() const {
  std::string names;
  for (const auto& unit : units_) names += (names.empty() ? "'" : ", '") + unit->plan_name() + "'";
  return names;
}

void FsdpRuntime::dismiss(bool writeback) {
  std::lock_guard lock(mutex_);
  Quiet quiet;
  for (auto& unit : units_)
    if (unit->is_pinned()) unit->unpin(writeback);
  summoned_ = summoned_elsewhere_ = false;
  release_all();
}

void FsdpRuntime::refuse(const Page& page, const at::Tensor& view, const std::string& operation) {
  if (page.id() < 0) use({const_cast<Page*>(&page)});  // throws: the gradients are elsewhere
  std::string parameter = "a parameter";
  for (const auto& group : units_[page.id()]->groups()) {
    for (size_t i = 0; i < group->flat.parameters().size(); ++i) {
      const auto offset = group->flat.layout().offset(static_cast<int64_t>(i));
      if (group->page.get() == &page && view.storage_offset() >= offset &&
          view.storage_offset() < offset + std::max<int64_t>(group->flat.layout().numel(static_cast<int64_t>(i)), 1))
        parameter = "parameter '" + group->flat.parameters()[i].fqn + "'";
    }
  }
  throw std::logic_error(operation + " would change " + parameter + " of " + page.name() + " on rank " +
                         std::to_string(groups_.world->rank()) +
                         ", which is sharded: change it inside summon_full_params(), or change the shards, "
                         "fsdp.parameters()");
}

// ---- what users ask for ------------------------------------------------------------------------

double FsdpRuntime::clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite) {
  require_outside_backward("clip_grad_norm_");
  Quiet quiet;
  std::vector<at::Tensor> gradients;
  for (auto& unit : units_) {
    for (auto& group : unit->groups()) {
      if (at::Tensor whole = group->flat.whole_gradient(); whole.defined()) {
        gradients.push_back(whole);
        continue;
      }
      for (const at::Tensor& shard : group->flat.parameter_shards())
        if (shard.grad().defined()) gradients.push_back(shard.grad());
    }
  }
  return clip_shards_by_norm(gradients, max_norm, norm_type, error_if_nonfinite, *groups_.shard);
}

void FsdpRuntime::visit_full_state(const VisitState& visit, const StateDictOptions& options) {
  std::lock_guard lock(mutex_);
  require_outside_backward("full_state_dict");
  Quiet quiet;
  const bool keep = !options.rank0_only || groups_.world->rank() == 0;
  std::unordered_set<std::string> sharded;
  auto show = [&](const std::string& name, const at::Tensor& tensor, const std::vector<std::string>& aliases = {}) {
    if (keep) visit(name, aliases, options.offload_to_cpu ? tensor.cpu() : tensor);
  };
  for (auto& unit : units_) {
    for (auto& group : unit->groups()) {
      const FlatGroup& flat = group->flat;
      at::Tensor bytes = gathered_.take(flat.exact_full_bytes());
      const at::Tensor full = bytes.view(flat.dtype());
      log_.add("all-gather", flat.name(), full.numel());
      flat.gather(full, *groups_.shard).wait();
      for (size_t i = 0; i < flat.parameters().size(); ++i) {
        const PlannedParameter& parameter = flat.parameters()[i];
        sharded.insert(parameter.fqn);
        sharded.insert(parameter.aliases.begin(), parameter.aliases.end());
        show(parameter.fqn, flat.view_in(full, i), parameter.aliases);
      }
      gathered_.give(bytes);
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

torch::OrderedDict<std::string, at::Tensor> FsdpRuntime::full_state_dict(const StateDictOptions& options) {
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

torch::OrderedDict<std::string, at::Tensor> FsdpRuntime::named_buffers() const {
  torch::OrderedDict<std::string, at::Tensor> buffers;
  for (const auto& buffer : module_->named_buffers())
    if (buffer.value().defined()) buffers.insert(buffer.key(), buffer.value());
  return buffers;
}

MemoryReport FsdpRuntime::memory() const {
  std::lock_guard lock(mutex_);
  MemoryReport report;
  for (const auto& unit : units_) {
    report.largest_unit_bytes = std::max(report.largest_unit_bytes, unit->full_bytes());
    for (const auto& group : unit->groups()) {
      report.shard_bytes += group->flat.shard_bytes();
      report.grad_bytes += group->flat.grad_bytes();
      report.unsharded_bytes += group->flat.unsharded_bytes();
    }
  }
  report.gathered_bytes = gathered_.lent_bytes();
  report.peak_gathered_bytes = gathered_.peak_lent_bytes();
  report.bucket_bytes = reducer_->bucket_bytes();
  report.peak_bucket_bytes = reducer_->peak_bucket_bytes();
  report.staging_bytes = staging_.lent_bytes();
  report.peak_staging_bytes = staging_.peak_lent_bytes();
  report.device_bytes = report.gathered_bytes + report.bucket_bytes + report.staging_bytes +
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

void FsdpRuntime::reset_peak_memory() {
  std::lock_guard lock(mutex_);
  gathered_.reset_peak();
  staging_.reset_peak();
  reducer_->reset_peak();
}

// The last pass that used units.
void FsdpRuntime::describe_order(std::ostream& text, const char* pass, const PrefetchOrder& order) const {
  const auto& seen = order.seen().empty() ? order.expected() : order.seen();
  if (seen.empty()) return;
  text << "  order seen in " << pass << ":";
  for (int unit : seen) text << (unit == seen.front() ? " " : ", ") << units_[unit]->name();
  text << "\n";
}

std::string FsdpRuntime::describe() const {
  std::lock_guard lock(mutex_);
  std::ostringstream text;
  text << units_.size() << " units over " << groups_.shard->size() << " ranks";
  if (groups_.replicas) text << ", " << groups_.copies() << " copies";
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
  describe_order(text, "forward", forward_order_);
  describe_order(text, "backward", backward_order_);
  return text.str();
}

}  // namespace tessera
