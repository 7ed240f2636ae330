#include "tessera/fsdp/scheduler.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "tessera/flat/quiet.h"
#include "tessera/flat/shard_norm.h"
#include "tessera/memory/memory_cache.h"

namespace tessera {

std::shared_ptr<Scheduler> Scheduler::wrap(torch::nn::Module& module, std::shared_ptr<Communicator> comm,
                                           const FsdpOptions& options) {
  if (!comm) throw std::invalid_argument("FullyShardedDataParallel: the communicator is null");
  require_residency();
  std::shared_ptr<Scheduler> scheduler(new Scheduler(module, std::move(comm), options));
  scheduler->install();
  return scheduler;
}

Scheduler::Scheduler(torch::nn::Module& module, std::shared_ptr<Communicator> comm, const FsdpOptions& options)
    : model_(module, std::move(comm), options, this), gradients_(model_, mutex_), versions_(model_.units().size()) {}

// What refers to the shared object.
void Scheduler::install() {
  auto with_self = [weak = weak_from_this()](auto act) {
    return [weak, act] {
      if (const auto self = weak.lock()) act(*self);
    };
  };
  pass_ =
      std::make_shared<BackwardPass>(BackwardPass::Events{with_self([](Scheduler& self) { self.end_backward(); }),
                                                          with_self([](Scheduler& self) { self.fail_backward(); })});
  gradients_.binding().set_take([weak = weak_from_this()](size_t parameter, const at::Tensor& gradient) {
    const auto self = weak.lock();
    if (!self) throw std::logic_error("a gradient for a FullyShardedDataParallel that no longer exists");
    return self->take(parameter, gradient);
  });
  gradients_.binding().hook_all();
}

// ---- events -------------------------------------------------------------------------------------

void Scheduler::use(const std::vector<Page*>& pages) {
  std::lock_guard lock(mutex_);
  const Page::Use mode = mode_of_use();
  Quiet quiet;
  trace_compute_ends();
  std::vector<Unit*> needed;
  for (Page* page : pages) {
    Unit* unit = model_.units()[page->id()].get();
    if (std::find(needed.begin(), needed.end(), unit) == needed.end()) needed.push_back(unit);
  }
  if (summoned_elsewhere_)
    throw std::logic_error("a parameter of " + needed[0]->name() + " is used on rank " +
                           std::to_string(model_.mesh().world->rank()) +
                           " while full parameters are summoned on rank 0 only");
  // A thread that a custom backward has started is not the engine's, but works for the pass that is running.
  const bool backward = inside_backward() || pass_->is_running();
  if (backward) {
    if (inside_backward()) enter_backward();
    for (Unit* unit : needed) require_unchanged(*unit);
  } else {
    if (failed_) recover();
    if (std::exchange(forward_is_new_, false)) forward_order_.begin_pass();
    for (Unit* unit : needed) inspect(*unit);
  }
  if (mode == Page::Use::kRecording) {
    for (Unit* unit : needed) {
      gradients_.expect(*unit);
      if (!backward) versions_[unit->index()] = unit->version();
    }
  }

  PrefetchOrder& order = backward ? backward_order_ : forward_order_;
  make_resident(needed);
  for (Unit* unit : needed) order.used(unit->index());
  prefetch(order);

  for (Unit* unit : current_) unit->set_current(Page::Use::kNone);
  current_ = needed;
  for (Unit* unit : needed) unit->set_current(mode);
  trace_compute(needed);
}

// Autograd would find that a saved parameter was changed in place; here it is the shards that were.
void Scheduler::require_unchanged(const Unit& unit) const {
  const auto& seen = versions_[unit.index()];
  if (seen && *seen != unit.version())
    throw std::logic_error("the shards of " + unit.name() + " on rank " + std::to_string(model_.mesh().world->rank()) +
                           " were modified by an inplace operation (optimizer.step(), say) between a forward and its "
                           "backward, which needs the values that forward used: step after backward");
}

void Scheduler::inspect(Unit& unit) {
  unit.bring_home(/*may_change=*/true);
  gradients_.inspect(unit);
}

at::Tensor Scheduler::take(size_t parameter, const at::Tensor& gradient) {
  std::lock_guard lock(mutex_);
  if (c10::GradMode::is_enabled())
    throw std::logic_error("backward with create_graph=true reached " + gradients_.binding().label(parameter) +
                           ": gradients of sharded parameters cannot be differentiated again");
  Quiet quiet;
  enter_backward();
  Unit& unit = gradients_.unit_of(parameter);
  if (gradients_.add(parameter, gradient, sync_)) release(unit);
  return {};  // nothing is left for the module's own parameter
}

void Scheduler::begin_forward() {
  std::lock_guard lock(mutex_);
  if (inside_backward()) return;  // a checkpointed part is computed again
  Quiet quiet;
  trace_compute_ends();
  if (failed_) recover();
  gradients_.binding().require_nothing_new();
  for (auto& unit : model_.units()) inspect(*unit);
  forward_order_.begin_pass();
  forward_is_new_ = false;
  forget_current();
  // Prefetched for a pass that took another way.
  for (auto& unit : model_.units())
    if (unit->state() == Unit::State::kGathering || unit->state() == Unit::State::kFetching) release(*unit);
}

// ---- backward -----------------------------------------------------------------------------------

void Scheduler::enter_backward() {
  if (!pass_->enter()) return;
  if (failed_) recover();
  if (backward_order_.expected().empty()) {
    std::vector<int> reversed(forward_order_.seen().rbegin(), forward_order_.seen().rend());
    backward_order_.expect(std::move(reversed));
  }
  backward_order_.begin_pass();
  for (auto& unit : model_.units()) unit->bring_home(/*may_change=*/false);
  gradients_.begin();
}

void Scheduler::end_backward() {
  std::lock_guard lock(mutex_);
  Quiet quiet;
  trace_compute_ends();
  forward_is_new_ = true;
  if (!sync_) {
    gradients_.end_without_reducing();
    return release_all();
  }
  try {
    gradients_.finish();
  } catch (const CommError&) {
    throw;  // nothing can be waited for any more
  } catch (const std::exception&) {
    gradients_.fail();
    recover();
    throw;
  }
  release_all();
  // The optimizer makes its state after the first backward: until then idle memory held what its first step needs.
  if (std::exchange(first_backward_, false) && model_.mesh().world->device().is_cpu()) release_freed_memory();
}

void Scheduler::fail_backward() {
  std::lock_guard lock(mutex_);
  Quiet quiet;
  failed_ = true;
  gradients_.fail();
}

void Scheduler::recover() {
  failed_ = false;
  forward_is_new_ = true;
  gradients_.abandon();
  release_all();
}

// ---- residency ----------------------------------------------------------------------------------

void Scheduler::make_resident(const std::vector<Unit*>& needed) {
  for (Unit* unit : needed)
    if (unit->is_stale() && unit->state() != Unit::State::kSharded && !unit->is_pinned()) release(*unit);
  evict_for(needed);
  for (Unit* unit : needed) unit->start_gather();
  for (Unit* unit : needed) unit->finish_gather();
  for (Unit* unit : needed) recent_.push_back(unit);
}

void Scheduler::evict_for(const std::vector<Unit*>& needed) {
  std::erase_if(recent_, [&](Unit* unit) { return std::find(needed.begin(), needed.end(), unit) != needed.end(); });
  if (!model_.options().reshard_after_forward) return;  // each goes when backward has all its gradients
  while (!recent_.empty() && recent_.size() + needed.size() > static_cast<size_t>(model_.options().keep_recent))
    release(*recent_.front());
}

void Scheduler::prefetch(const PrefetchOrder& order) {
  const int count = model_.options().prefetch;
  if (model_.has_disk())
    for (int index : order.upcoming(count + 2)) model_.units()[index]->read_ahead();
  if (model_.options().offload.params)  // the nearest first, so that its copy is not behind another's
    for (int index : order.upcoming(count + 1)) model_.units()[index]->start_fetch();
  for (int index : order.upcoming(count)) model_.units()[index]->start_gather();
}

void Scheduler::release(Unit& unit) {
  std::erase(recent_, &unit);
  if (!unit.is_pinned()) unit.release();
}

void Scheduler::forget_current() {
  for (Unit* unit : current_) unit->set_current(Page::Use::kNone);
  current_.clear();
}

void Scheduler::release_all() {
  for (auto& unit : model_.units()) release(*unit);
  for (auto& unit : model_.units()) unit->set_current(Page::Use::kNone);
  current_.clear();
  recent_.clear();
  std::fill(versions_.begin(), versions_.end(), std::nullopt);
}

// ---- scopes -------------------------------------------------------------------------------------

void Scheduler::require_outside_backward(const char* call) const {
  if (inside_backward()) throw std::logic_error(std::string(call) + " inside a backward pass");
}

void Scheduler::set_sync(bool sync) {
  std::lock_guard lock(mutex_);
  require_outside_backward("no_sync");
  sync_ = sync;
}

void Scheduler::set_divisor(double divisor) {
  if (!(divisor > 0))
    throw std::invalid_argument("set_gradient_divide_factor: got " + std::to_string(divisor) +
                                ", expected more than 0");
  std::lock_guard lock(mutex_);
  gradients_.reducer().set_divisor(divisor);
}

void Scheduler::observe_gradients(GradientReducer::Observer observer) {
  std::lock_guard lock(mutex_);
  require_outside_backward("on_gradients");
  GradientReducer& reducer = gradients_.reducer();
  if (observer && reducer.has_observer())
    throw std::logic_error("on_gradients: somebody is told about gradients already");
  if (observer && model_.options().check_finite)
    throw std::invalid_argument(
        "on_gradients with FsdpOptions::check_finite: the check comes at the end of backward, when "
        "steps have been taken already");
  reducer.set_observer(std::move(observer));
}

void Scheduler::summon(const SummonOptions& options) {
  std::lock_guard lock(mutex_);
  require_outside_backward("summon_full_params");
  if (summoned_) throw std::logic_error("summon_full_params inside another summon_full_params");
  if (options.rank0_only && options.writeback)
    throw std::invalid_argument("SummonOptions::rank0_only and writeback are both true, expected writeback = false");
  const Communicator& world = *model_.mesh().world;
  if (options.offload_to_cpu && !world.device().is_cpu())
    throw std::invalid_argument("SummonOptions::offload_to_cpu is true on " + world.device().str() +
                                ": not built yet, expected false");
  const std::vector<Unit*> chosen = model_.units_named(options.units);
  Quiet quiet;
  if (failed_) recover();
  for (auto& unit : model_.units()) inspect(*unit);
  release_all();
  summoned_elsewhere_ = options.rank0_only && world.rank() != 0;
  for (Unit* unit : chosen) summoned_elsewhere_ ? unit->help_to_pin() : unit->pin(options.writeback);
  summoned_ = true;
}

void Scheduler::dismiss(bool writeback) {
  std::lock_guard lock(mutex_);
  Quiet quiet;
  for (auto& unit : model_.units())
    if (unit->is_pinned()) unit->unpin(writeback);
  summoned_ = summoned_elsewhere_ = false;
  for (auto& unit : model_.units()) inspect(*unit);
  release_all();
}

void Scheduler::refuse(const Page& page, const at::Tensor& view, const std::string& operation) {
  const std::string rank = std::to_string(model_.mesh().world->rank());
  std::string parameter = "a parameter";
  for (const auto& group : model_.units()[page.id()]->groups()) {
    if (&group->flat.shard_page() == &page)
      throw std::logic_error(
          operation + " would change " + page.name() + " on rank " + rank +
          " inside summon_full_params(), whose full parameters would not follow: leave the scope first "
          "(before optimizer.step(), say)");
    for (size_t i = 0; i < group->flat.parameters().size(); ++i) {
      const auto offset = group->flat.layout().offset(static_cast<int64_t>(i));
      if (group->page.get() == &page && view.storage_offset() >= offset &&
          view.storage_offset() < offset + std::max<int64_t>(group->flat.layout().numel(static_cast<int64_t>(i)), 1))
        parameter = "parameter '" + group->flat.parameters()[i].fqn + "'";
    }
  }
  throw std::logic_error(operation + " would change " + parameter + " of " + page.name() + " on rank " + rank +
                         ", which is sharded: change it inside summon_full_params(), or change the shards, "
                         "fsdp.parameters()");
}

// ---- what users ask for -------------------------------------------------------------------------

double Scheduler::clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite) {
  require_outside_backward("clip_grad_norm_");
  Quiet quiet;
  gradients_.require_ready();
  std::vector<at::Tensor> gradients;
  for (auto& unit : model_.units()) {
    for (auto& group : unit->groups()) {
      if (at::Tensor whole = group->flat.gradient().whole_gradient(); whole.defined()) {
        gradients.push_back(whole);
        continue;
      }
      for (const at::Tensor& shard : group->flat.parameter_shards())
        if (shard.grad().defined()) gradients.push_back(shard.grad());
    }
  }
  return clip_shards_by_norm(gradients, max_norm, norm_type, error_if_nonfinite, *model_.mesh().shard);
}

void Scheduler::visit_full_state(const ShardedModel::VisitState& visit, const StateDictOptions& options) {
  std::lock_guard lock(mutex_);
  require_outside_backward("full_state_dict");
  Quiet quiet;
  if (failed_) recover();
  model_.visit_full_state(visit, options);
}

torch::OrderedDict<std::string, at::Tensor> Scheduler::full_state_dict(const StateDictOptions& options) {
  std::lock_guard lock(mutex_);
  require_outside_backward("full_state_dict");
  Quiet quiet;
  if (failed_) recover();
  return model_.full_state_dict(options);
}

MemoryReport Scheduler::memory() const {
  std::lock_guard lock(mutex_);
  MemoryReport report = model_.memory();
  report.bucket_bytes = gradients_.reducer().bucket_bytes();
  report.peak_bucket_bytes = gradients_.reducer().peak_bucket_bytes();
  report.device_bytes += report.bucket_bytes;
  return report;
}

void Scheduler::reset_peak_memory() {
  std::lock_guard lock(mutex_);
  model_.reset_peak_memory();
  gradients_.reducer().reset_peak();
}

// The last pass that used units.
void Scheduler::describe_order(std::ostream& text, const char* pass, const PrefetchOrder& order) const {
  const auto& seen = order.seen().empty() ? order.expected() : order.seen();
  if (seen.empty()) return;
  text << "  order seen in " << pass << ":";
  for (int unit : seen) text << (unit == seen.front() ? " " : ", ") << model_.units()[unit]->name();
  text << "\n";
}

std::string Scheduler::describe() const {
  std::lock_guard lock(mutex_);
  std::ostringstream text;
  model_.describe(text);
  describe_order(text, "forward", forward_order_);
  describe_order(text, "backward", backward_order_);
  return text.str();
}

// ---- trace --------------------------------------------------------------------------------------

// A unit computes from its use on until another's, or the end of the pass; waits for gradients of
// others lie within.
void Scheduler::trace_compute(const std::vector<Unit*>& units) {
  if (Trace::active() == nullptr) return;
  for (const Unit* unit : units) computing_ += (computing_.empty() ? "" : ", ") + unit->name();
  computing_since_ = Trace::Clock::now();
}

void Scheduler::trace_compute_ends() {
  if (computing_.empty()) return;
  Trace::active()->add(SpanKind::kCompute, computing_, inside_backward() ? "backward" : "forward", computing_since_,
                       Trace::Clock::now());
  computing_.clear();
}

}  // namespace tessera
