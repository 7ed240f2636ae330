#include "fsdp/scheduler.h"

#include <algorithm>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "core/memory/memory_cache.h"
#include "core/model/shard_norm.h"
#include "core/runtime/no_grad_no_inference_guard.h"
#include "fsdp/checks/parameter_checks.h"

namespace tessera::internal {
namespace {

void require_outside_backward(const char* call) {
  if (inside_backward()) throw std::logic_error(std::string(call) + " inside a backward pass");
}

}  // namespace

std::shared_ptr<Scheduler> Scheduler::wrap(torch::nn::Module& module, std::shared_ptr<Communicator> comm,
                                           const FsdpOptions& options) {
  if (!comm) throw std::invalid_argument("FullyShardedDataParallel: the communicator is null");
  require_residency();
  std::shared_ptr<Scheduler> scheduler(new Scheduler(module, std::move(comm), options));
  Binding& binding = scheduler->gradients_.binding();
  binding.set_take(while_alive(
      std::weak_ptr(scheduler),
      [](Scheduler& self, size_t parameter, const at::Tensor& gradient) { return self.take(parameter, gradient); },
      [](size_t, const at::Tensor&) -> at::Tensor {
        throw std::logic_error("a gradient for a FullyShardedDataParallel that no longer exists");
      }));
  binding.hook_all();
  return scheduler;
}

Scheduler::Scheduler(torch::nn::Module& module, std::shared_ptr<Communicator> comm, const FsdpOptions& options)
    : model_(module, std::move(comm), options, this),
      gradients_(model_,
                 [this](const auto& change) {
                   std::lock_guard lock(mutex_);
                   change();
                 }),
      unsharded_(model_) {}

// ---- events -------------------------------------------------------------------------------------

void Scheduler::use(const std::vector<Page*>& pages) {
  std::lock_guard lock(mutex_);
  const Page::GradMode mode = current_grad_mode();
  NoGradNoInferenceGuard quiet;
  unsharded_.end_compute_span();
  const std::vector<Unit*> needed = model_.units_of(pages);
  if (summon_ == Summon::kElsewhere)
    throw std::logic_error("a parameter of " + needed[0]->name() + " is used on rank " + model_.rank_text() +
                           " while full parameters are summoned on rank 0 only");
  // A thread that a custom backward started is not the engine's, but works for the running pass.
  const bool backward = inside_backward() || is_running();
  if (backward) {
    if (inside_backward()) enter();
  } else {
    require_use("a parameter of " + needed[0]->name() + " is used");
    recover();
    // Also inside forward(), which may freeze or replace parameters itself.
    for (Unit* unit : needed) {
      inspect(*unit);
      gradients_.show_version(*unit);
    }
  }
  if (mode == Page::GradMode::kRecording)
    for (Unit* unit : needed) gradients_.expect(*unit);
  unsharded_.use(needed, mode, backward);
  for (const Page* page : pages) require_attached(*model_.units()[page->id()], *page, model_.rank_text());
}

// Before a forward or a read of all values.
void Scheduler::begin_look() {
  recover();
  gradients_.binding().require_nothing_new();
  model_.cast_buffers().require_no_foreign_bytes(model_.rank_text());
}

void Scheduler::inspect(Unit& unit) {
  reattach(unit, /*may_change=*/true);
  gradients_.inspect(unit);
}

void Scheduler::inspect_all() {
  for (auto& unit : model_.units()) inspect(*unit);
}

at::Tensor Scheduler::take(size_t parameter, const at::Tensor& gradient) {
  if (c10::GradMode::is_enabled())
    throw std::logic_error("backward with create_graph=true reached " + gradients_.binding().label(parameter) +
                           ": gradients of sharded parameters cannot be differentiated again");
  NoGradNoInferenceGuard quiet;
  if (is_paged(gradient)) return take(parameter, gradient.clone());  // a custom backward returned a parameter
  {
    std::lock_guard lock(mutex_);
    enter();
    if (gradients_.add(parameter, gradient)) {
      Unit& unit = gradients_.unit_of(parameter);
      if (reduces()) unit.secondary().drop();  // the step that follows changes the shards
      unsharded_.reshard(unit);
    }
    if (reduces()) gradients_.reducer().start_full_ones();  // after reshard(): buckets may reuse its memory
  }
  tell_observer();
  return {};  // the module's own parameter gets no gradient
}

void Scheduler::tell_observer() {
  GradientReducer::Observer observer;
  std::vector<std::vector<at::Tensor>> buckets;
  {
    std::lock_guard lock(mutex_);
    if (to_observe_.empty()) return;
    buckets.swap(to_observe_);
    observer = observer_;
  }
  for (const auto& leaves : buckets) observer(leaves);
}

ScopeExit Scheduler::pre_forward() {
  std::lock_guard lock(mutex_);
  if (inside_backward()) return ScopeExit(nullptr);  // a recomputation of a checkpointed part
  require_use("forward()");
  if (summon_ == Summon::kOnHost)
    throw std::logic_error("forward() inside summon_full_params() with offload_to_cpu on rank " + model_.rank_text() +
                           ": the parameters are in host memory, leave the scope first");
  const bool trains = reduces() && c10::GradMode::is_enabled();
  NoGradNoInferenceGuard quiet;
  begin_look();
  inspect_all();
  gradients_.begin_forward();
  unsharded_.pre_forward();
  if (!trains) return ScopeExit(nullptr);
  return ScopeExit([this, exceptions = std::uncaught_exceptions()] {
    std::uncaught_exceptions() == exceptions ? model_.log().add_forward() : model_.log().add_failed_forward();
  });
}

void Scheduler::post_forward() {
  if (!c10::GradMode::is_enabled() && !inside_backward()) model_.mesh().world->throw_if_aborted("forward()");
}

// ---- backward -----------------------------------------------------------------------------------

void Scheduler::begin() {
  unsharded_.pre_backward();
  for (auto& unit : model_.units()) reattach(*unit, /*may_change=*/false);
  to_observe_.clear();
  gradients_.begin();
}

void Scheduler::end() {
  unsharded_.end_compute_span();
  unsharded_.post_backward(/*accumulates=*/!reduces());
  reduces() ? gradients_.finish() : gradients_.end_without_reducing();
  unsharded_.reshard_all();
  // The first step allocates the optimizer's state: return idle memory to the process before it.
  if (reduces() && std::exchange(first_backward_, false) && model_.mesh().world->device().is_cpu())
    release_freed_memory();
}

void Scheduler::abandon() {
  unsharded_.post_backward(/*accumulates=*/false);
  gradients_.abandon();
  if (failed_reducing()) model_.log().add("a failed backward");
  unsharded_.reshard_all();
}

// ---- scopes -------------------------------------------------------------------------------------

void Scheduler::set_divisor(double divisor) {
  std::lock_guard lock(mutex_);
  gradients_.reducer().set_divisor(divisor);
}

void Scheduler::require_use(const std::string& use) const {
  if (!refusal_.empty()) throw std::logic_error(use + " on rank " + model_.rank_text() + ": " + refusal_);
}

void Scheduler::refuse_use(std::string reason) {
  std::lock_guard lock(mutex_);
  refusal_ = std::move(reason);
}

void Scheduler::observe_gradients(GradientReducer::Observer observer, std::function<void()> failed) {
  std::lock_guard lock(mutex_);
  require_outside_backward("on_gradients");
  if (observer && observer_) throw std::logic_error("on_gradients: somebody is told about gradients already");
  if (observer && model_.options().check_finite)
    throw std::invalid_argument(
        "on_gradients with FsdpOptions::check_finite: the check comes at the end of backward, when "
        "steps have been taken already");
  gradients_.reducer().set_observer(!observer ? GradientReducer::Observer()
                                              : [this](const auto& leaves) { to_observe_.push_back(leaves); });
  observer_ = std::move(observer);
  observer_of_failures_ = std::move(failed);
}

void Scheduler::after_failure() {
  std::function<void()> observer;
  {
    std::lock_guard lock(mutex_);
    observer = observer_of_failures_;
  }
  if (observer) observer();
}

void Scheduler::summon(const SummonOptions& options) {
  std::lock_guard lock(mutex_);
  require_outside_backward("summon_full_params");
  require_use("summon_full_params");
  if (summon_ != Summon::kNone) throw std::logic_error("summon_full_params inside another summon_full_params");
  Communicator& world = *model_.mesh().world;
  const std::vector<Unit*> chosen = model_.units_named(checked(options).units);
  NoGradNoInferenceGuard quiet;
  recover();
  inspect_all();
  unsharded_.reshard_all();
  summon_ = options.rank0_only && world.rank() != 0              ? Summon::kElsewhere
            : options.offload_to_cpu && !world.device().is_cpu() ? Summon::kOnHost
                                                                 : Summon::kOnDevice;
  using Changes = SummonedParameters::Changes;
  try {
    for (Unit* unit : chosen) unit->summon(summon_, options.writeback ? Changes::kWrittenBack : Changes::kLost);
    world.throw_if_aborted("summon_full_params");
  } catch (...) {
    dismiss_units(/*writeback=*/false);
    throw;
  }
}

void Scheduler::dismiss(bool writeback) {
  std::lock_guard lock(mutex_);
  NoGradNoInferenceGuard quiet;
  dismiss_units(writeback);
}

void Scheduler::dismiss_units(bool writeback) {
  for (auto& unit : model_.units())
    if (unit->is_summoned()) unit->dismiss(writeback);
  summon_ = Summon::kNone;
  inspect_all();
  unsharded_.reshard_all();
}

void Scheduler::show_in_shards() {
  std::lock_guard lock(mutex_);
  if (inside_backward() || is_running()) return;  // the running pass computes with the shards
  NoGradNoInferenceGuard quiet;
  begin_look();
  for (auto& unit : model_.units()) unit->is_summoned() ? unit->write_back() : reattach(*unit, /*may_change=*/true);
}

const std::vector<NamedShard>& Scheduler::named_shards() {
  std::lock_guard lock(mutex_);
  if (inside_backward() || is_running()) return model_.named_shards();
  NoGradNoInferenceGuard quiet;
  for (auto& unit : model_.units()) reattach(*unit, /*may_change=*/true);
  gradients_.follow_freezing();
  return model_.named_shards();
}

bool Scheduler::shows_exact_values() const {
  return summon_ != Summon::kNone &&
         std::ranges::all_of(model_.units(), [](const auto& unit) { return unit->is_summoned(); });
}

bool Scheduler::refuse(const Page& page, const at::Tensor& view, const std::string& operation) {
  require_write(*model_.units()[page.id()], page, view, operation, model_.rank_text());
  return false;
}

// Without the mutex: writes come from the optimizer's threads, and from within a phase.
void Scheduler::before_write(int index) {
  const auto& units = model_.units();
  if (const auto at = static_cast<size_t>(index); at < units.size() && units[at]) units[at]->wait_for_reads();
}

// ---- requests of users --------------------------------------------------------------------------

GradNorm Scheduler::clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite) {
  require_outside_backward("clip_grad_norm_");
  NoGradNoInferenceGuard quiet;
  const std::vector<at::Tensor> whole = gradients_.ready();
  std::vector<at::Tensor> scaled;  // without the padding of buffers, which must stay 0
  for (const NamedShard& shard : model_.named_shards())
    if (shard.tensor.grad().defined()) scaled.push_back(shard.tensor.grad());
  return clip_shards_by_norm(whole, max_norm, norm_type, error_if_nonfinite, *model_.mesh().shard, &scaled);
}

void Scheduler::visit_full_state(const VisitState& visit, const StateDictOptions& options) {
  NoGradNoInferenceGuard quiet;
  {
    std::lock_guard lock(mutex_);
    require_outside_backward("full_state_dict");
    require_use("full_state_dict");
    begin_look();
    for (auto& unit : model_.units()) reattach(*unit, /*may_change=*/true);
  }
  internal::visit_full_state(model_, visit, options);
}

MemoryReport Scheduler::memory() const {
  std::lock_guard lock(mutex_);
  MemoryReport report = model_.memory();
  gradients_.reducer().report(report);
  report.device_bytes += report.bucket_bytes;
  return report;
}

void Scheduler::reset_peak_memory() {
  std::lock_guard lock(mutex_);
  model_.reset_peak_memory();
  gradients_.reducer().reset_peak();
}

std::string Scheduler::describe() const {
  std::lock_guard lock(mutex_);
  std::ostringstream text;
  model_.describe(text);
  unsharded_.describe(text);
  return text.str();
}

}  // namespace tessera::internal
