#include "fsdp/scheduler.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>

#include "core/memory/memory_cache.h"
#include "core/runtime/no_grad_no_inference_guard.h"
#include "fsdp/checks/parameter_checks.h"

namespace tessera::internal {
namespace {

// Returns the units of the pages, without duplicates.
std::vector<Unit*> units_of(const std::vector<Page*>& pages, const ShardedModel& model) {
  std::vector<Unit*> units;
  for (const Page* page : pages)
    if (Unit* unit = model.units()[page->id()].get(); std::ranges::find(units, unit) == units.end())
      units.push_back(unit);
  return units;
}

}  // namespace

// ---- events -------------------------------------------------------------------------------------

void Scheduler::use(const std::vector<Page*>& pages) {
  std::lock_guard lock(mutex_);
  const Page::GradMode mode = current_grad_mode();
  NoGradNoInferenceGuard quiet;
  unsharded_.end_compute_span();
  const std::vector<Unit*> needed = units_of(pages, model_);
  if (summon_ == Summon::kElsewhere)
    throw std::logic_error("a parameter of " + needed[0]->name() + " is used on rank " + model_.rank_text() +
                           " while full parameters are summoned on rank 0 only");
  // is_running() is also true on threads that a custom backward started.
  const bool backward = inside_backward() || is_running();
  if (backward) {
    if (inside_backward()) enter();
  } else {
    require_use("a parameter of " + needed[0]->name() + " is used");
    recover();
    // Inspects units at each use, because forward() itself may freeze or replace parameters.
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

bool Scheduler::refuse(const Page& page, const at::Tensor& view, const std::string& operation) {
  require_write(*model_.units()[page.id()], page, view, operation, model_.rank_text());
  return false;
}

// Does not lock the mutex: optimizers write on their own threads, and some callers write while they hold the mutex.
void Scheduler::before_write(int index) {
  const auto& units = model_.units();
  if (const auto at = static_cast<size_t>(index); at < units.size() && units[at]) units[at]->wait_for_reads();
}

void Scheduler::require_use(const std::string& use) const {
  if (!refusal_.empty()) throw std::logic_error(use + " on rank " + model_.rank_text() + ": " + refusal_);
}

// Must be called before each forward or replay, and before each save.
void Scheduler::begin_look() {
  recover();
  gradients_.binding().require_nothing_new();
  model_.cast_buffers().require_no_foreign_bytes(model_.rank_text());
}

void Scheduler::inspect(Unit& unit) {
  reattach(unit, /*may_change=*/true);
  gradients_.inspect(unit);
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
      if (reduces()) unit.secondary().drop();  // the next step changes the shards, so the secondary shard becomes stale
      unsharded_.reshard(unit);
    }
    if (reduces()) gradients_.reducer().start_full_ones();  // after reshard(): buckets may reuse the freed memory
  }
  tell_observer();
  return {};  // the module's own parameter must get no gradient
}

ScopeExit Scheduler::pre_forward() {
  std::lock_guard lock(mutex_);
  if (inside_backward()) return ScopeExit(nullptr);  // backward recomputes a part of the model
  require_use("forward()");
  if (summon_ == Summon::kOnHost)
    throw std::logic_error("forward() inside summon_full_params() with offload_to_cpu on rank " + model_.rank_text() +
                           ": the parameters are in host memory, leave the scope first");
  const bool trains = reduces() && c10::GradMode::is_enabled();
  NoGradNoInferenceGuard quiet;
  begin_look();
  for (auto& unit : model_.units()) inspect(*unit);
  gradients_.begin_forward();
  unsharded_.pre_forward();
  return ScopeExit([this, trains, exceptions = std::uncaught_exceptions()] {
    const bool has_failed = std::uncaught_exceptions() != exceptions;
    if (has_failed) unsharded_.end_compute_span();
    if (trains) has_failed ? model_.log().add_failed_forward() : model_.log().add_forward();
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
  // The first step will allocate optimizer state, so idle memory is freed now.
  if (reduces() && std::exchange(first_backward_, false) && model_.mesh().world->device().is_cpu())
    release_freed_memory();
}

void Scheduler::abandon() {
  unsharded_.end_compute_span();
  unsharded_.post_backward(/*accumulates=*/false);
  gradients_.abandon();
  if (failed_reducing()) model_.log().add("a failed backward");
  unsharded_.reshard_all();
}

}  // namespace tessera::internal
