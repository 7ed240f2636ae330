#include "fsdp/unsharded_units.h"

#include <algorithm>
#include <utility>

#include "core/gradients/backward_pass.h"

namespace tessera::internal {

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

// [Note: Evicting at the turn] At the turn from forward to backward, a rank holds the most memory. If all-gathers copy
// from peer memory, a second gather of the last units is cheaper than keeping them. With few units, the extra
// all-gathers cost too much. The rule depends only on values that are equal on all ranks.
constexpr size_t kLeastUnitsToEvictAtTheTurn = 8;

void UnshardedUnits::evict_for(const std::vector<Unit*>& needed, bool is_first_of_backward) {
  std::erase_if(recent_, [&](Unit* unit) { return std::find(needed.begin(), needed.end(), unit) != needed.end(); });
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

// Called at the next use() or at the end of the pass, so the span includes waits for other units' gradients.
void UnshardedUnits::end_compute_span() {
  computing_.end(SpanKind::kCompute, inside_backward() ? "backward" : "forward");
}

}  // namespace tessera::internal
