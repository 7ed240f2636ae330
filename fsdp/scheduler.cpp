#include "fsdp/scheduler.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>

#include "core/memory/memory_cache.h"
#include "core/runtime/graph_recorder.h"
#include "core/runtime/no_grad_no_inference_guard.h"
#include "fsdp/checks/parameter_checks.h"

namespace tessera::internal {
namespace {

std::vector<Unit*> units_of(const std::vector<Page*>& pages, const ShardedModel& model) {
  std::vector<Unit*> units;
  for (const Page* page : pages)
    if (Unit* unit = model.units()[page->id()].get(); std::ranges::find(units, unit) == units.end())
      units.push_back(unit);
  return units;
}

}  // namespace

// ---- events -------------------------------------------------------------------------------------

std::shared_ptr<void> Scheduler::use(const std::vector<Page*>& pages) {
  std::lock_guard lock(mutex_);
  const Page::GradMode mode = current_grad_mode();
  NoGradNoInferenceGuard quiet;
  unsharded_.end_compute_span();
  const std::vector<Unit*> needed = units_of(pages, model_);
  if (summon_ == Summon::kElsewhere)
    throw std::logic_error("a parameter of " + needed[0]->name() + " is used on rank " + model_.rank_text() +
                           " while full parameters are summoned on rank 0 only");
  // On threads that a custom backward started, only is_running() is true.
  const bool backward = inside_backward() || is_running();
  if (backward) {
    if (inside_backward()) enter();
  } else {
    require_use("a parameter of " + needed[0]->name() + " is used");
    CapturedWork::note_use(model_.mesh().world->device(), shared_from_this());
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
  return nullptr;
}

bool Scheduler::refuse(const Page& page, const at::Tensor& view, const std::string& operation) {
  require_write(*model_.units()[page.id()], page, view, operation, model_.rank_text());
  return false;
}

// Must not lock the mutex, because some callers hold it while they write. Optimizers call this from their own threads.
void Scheduler::before_write(int index) {
  const auto& units = model_.units();
  if (const auto at = static_cast<size_t>(index); at < units.size() && units[at]) units[at]->wait_for_reads();
}

void Scheduler::require_use(const std::string& use) const {
  if (!refusal_.empty()) throw std::logic_error(use + " on rank " + model_.rank_text() + ": " + refusal_);
}

// Abandons a failed backward, and throws std::logic_error for added parameters or buffers with foreign bytes. Must be
// called before each forward, replay, save or visit_full_state().
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
  auto call = std::make_shared<UserCall>(*this, "forward()");
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
  return ScopeExit([this, call, trains, exceptions = std::uncaught_exceptions()] {
    const bool has_failed = std::uncaught_exceptions() != exceptions;
    if (has_failed) unsharded_.end_compute_span();
    if (trains) has_failed ? model_.log().add_failed_forward() : model_.log().add_forward();
  });
}

void Scheduler::post_forward() {
  if (inside_backward()) return;
  if (!c10::GradMode::is_enabled()) return model_.mesh().world->throw_if_aborted("forward()");
  if (model_.mesh().world->device().is_cpu()) return;
  std::lock_guard lock(mutex_);
  NoGradNoInferenceGuard quiet;
  unsharded_.post_forward();
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

void Scheduler::abandon(bool reduced) {
  unsharded_.end_compute_span();
  unsharded_.post_backward(/*accumulates=*/false);
  gradients_.abandon();
  if (reduced) model_.log().add("a failed backward");
  unsharded_.reshard_all();
}

// ---- unsharded units ----------------------------------------------------------------------------

void UnshardedUnits::pre_forward() {
  end_compute_span();
  forward_order_.begin_pass();
  forward_is_new_ = false;
  set_current({}, Page::GradMode::kNone);
  for (auto& unit : model_.units())
    if (unit->state() == Unit::State::kUnsharding || unit->state() == Unit::State::kFetching) reshard(*unit);
  if (!accumulates_) drop_secondaries();
}

void UnshardedUnits::post_backward(bool accumulates) {
  forward_is_new_ = true;
  accumulates_ = accumulates;
}

// Must be called at the same points on all ranks. A write to a shard must not trigger this call, because an optimizer
// may skip a parameter without elements on this rank.
void UnshardedUnits::drop_secondaries() {
  for (auto& unit : model_.units()) unit->secondary().drop();
}

// For the first backward, predicts the reverse order of forward.
void UnshardedUnits::pre_backward() {
  if (backward_order_.expected().empty())
    backward_order_.expect({forward_order_.seen().rbegin(), forward_order_.seen().rend()});
  backward_order_.begin_pass();
}

void UnshardedUnits::use(const std::vector<Unit*>& needed, Page::GradMode mode, bool backward) {
  PrefetchOrder& order = backward ? backward_order_ : forward_order_;
  if (!backward && std::exchange(forward_is_new_, false)) {
    order.begin_pass();
    if (!accumulates_) drop_secondaries();
  }
  for (Unit* unit : needed)
    if (unit->is_stale() && unit->state() != Unit::State::kSharded) reshard(*unit);
  evict_for(needed, backward && order.seen().empty());
  for (Unit* unit : needed) unit->unshard();
  for (Unit* unit : needed) unit->wait_for_unshard();
  for (Unit* unit : needed) {
    if (!backward && mode == Page::GradMode::kRecording) unit->secondary().keep();
    recent_.push_back(unit);
    order.used(unit->index());
    if (order.seen().size() > most_seen()) order.forget_repetition();
  }
  prefetch(order);
  set_current(needed, mode);
  if (!OpenSpan::is_recorded()) return;
  std::string names;
  for (const Unit* unit : needed) names += (names.empty() ? "" : ", ") + unit->name();
  computing_.begin(std::move(names), backward ? "backward" : "forward");
}

// [Note: Evicting at the turn] At the turn from forward to backward, a rank holds the most memory. So it reshards
// recent units: on a device after forward, as FSDP2 does; on CPUs those whose all-gathers are lazy, because a second
// copy from peer memory is cheap. With few units, the extra all-gathers cost too much. The rule depends only on values
// that are equal on all ranks.
constexpr size_t kLeastUnitsToEvictAtTheTurn = 8;

void UnshardedUnits::post_forward() {
  if (!model_.options().reshard_after_forward || model_.units().size() < kLeastUnitsToEvictAtTheTurn) return;
  for (Unit* unit : std::vector<Unit*>(recent_))
    if (std::ranges::find(current_, unit) == current_.end()) reshard(*unit);
}

void UnshardedUnits::evict_for(const std::vector<Unit*>& needed, bool is_first_of_backward) {
  std::erase_if(recent_, [&](Unit* unit) { return std::ranges::find(needed, unit) != needed.end(); });
  if (!model_.options().reshard_after_forward) return;  // backward reshards a unit after its last gradient
  while (!recent_.empty() && recent_.size() + needed.size() > static_cast<size_t>(model_.options().keep_recent))
    reshard(*recent_.front());
  if (!is_first_of_backward || model_.units().size() < kLeastUnitsToEvictAtTheTurn) return;
  for (Unit* unit : std::vector<Unit*>(recent_))
    if (!unit->can_unshard_ahead()) reshard(*unit);
}

// [Note: Overlapping all-gathers] The order of the last pass predicts the next units. Their all-gathers start before
// the current unit computes, so communication overlaps with computation. Copies from the host start one unit earlier,
// and disk reads start two units earlier. The nearest unit is first, because one engine runs the copies in order.
void UnshardedUnits::prefetch(const PrefetchOrder& order) {
  const int count = model_.options().prefetch;
  if (model_.offload().has_disk())
    for (int index : order.upcoming(count + 2)) model_.units()[index]->read_ahead();
  if (model_.options().offload.params)
    for (int index : order.upcoming(count + 1)) model_.units()[index]->start_fetch();
  for (int index : order.upcoming(count))
    if (Unit& unit = *model_.units()[index]; unit.can_unshard_ahead()) unit.unshard();
}

void UnshardedUnits::reshard(Unit& unit) {
  std::erase(recent_, &unit);
  unit.reshard();
}

void UnshardedUnits::reshard_all() {
  if (!accumulates_) drop_secondaries();
  for (auto& unit : model_.units()) {
    reshard(*unit);
    unit->set_current(Page::GradMode::kNone);
  }
  current_.clear();
  recent_.clear();
}

void UnshardedUnits::set_current(std::vector<Unit*> units, Page::GradMode mode) {
  for (Unit* unit : current_) unit->set_current(Page::GradMode::kNone);
  current_ = std::move(units);
  for (Unit* unit : current_) unit->set_current(mode);
}

// The span also includes waits for other units' gradients, because the next use(), forward or end of backward ends it.
void UnshardedUnits::end_compute_span() { computing_.end(SpanKind::kCompute); }

}  // namespace tessera::internal
