#include "fsdp/resident_units.h"

#include <algorithm>
#include <utility>

#include "core/gradients/backward_pass.h"

namespace tessera::internal {

void ResidentUnits::begin_forward() {
  computing_ends();
  forward_order_.begin_pass();
  forward_is_new_ = false;
  set_current({}, Page::GradMode::kNone);
  for (auto& unit : model_.units())
    if (unit->state() == Unit::State::kGathering || unit->state() == Unit::State::kFetching) release(*unit);
  if (!accumulates_) drop_secondaries();
}

void ResidentUnits::expect_forward(bool accumulates) {
  forward_is_new_ = true;
  accumulates_ = accumulates;
}

// What all ranks do at the same point. Whether shards were written to is seen by each for itself, and a rank that has
// nothing of a parameter may leave it out.
void ResidentUnits::drop_secondaries() {
  for (auto& unit : model_.units()) unit->drop_secondary();
}

// The first is expected to use units in forward's order, reversed.
void ResidentUnits::begin_backward() {
  if (backward_order_.expected().empty())
    backward_order_.expect({forward_order_.seen().rbegin(), forward_order_.seen().rend()});
  backward_order_.begin_pass();
}

void ResidentUnits::use(const std::vector<Unit*>& needed, Page::GradMode mode, bool backward) {
  PrefetchOrder& order = backward ? backward_order_ : forward_order_;
  if (!backward && std::exchange(forward_is_new_, false)) {
    order.begin_pass();
    if (!accumulates_) drop_secondaries();
  }
  for (Unit* unit : needed)
    if (unit->is_stale() && unit->state() != Unit::State::kSharded && !unit->is_pinned()) release(*unit);
  evict_for(needed, backward && order.seen().empty());
  for (Unit* unit : needed) unit->start_gather();
  for (Unit* unit : needed) {
    unit->finish_gather();
    unit->use_here();
  }
  for (Unit* unit : needed) {
    if (!backward && mode == Page::GradMode::kRecording) unit->keep_secondary();
    recent_.push_back(unit);
    order.used(unit->index());
  }
  prefetch(order);
  set_current(needed, mode);
  if (Trace::active() == nullptr) return;
  for (const Unit* unit : needed) computing_ += (computing_.empty() ? "" : ", ") + unit->name();
  computing_since_ = Trace::Clock::now();
}

// Where a gather is a copy from peers' memory, one more at the turn from forward to backward costs less than a unit
// that lies there as the first gradients come, which is when a rank holds the most. Not if it would be one of few. What
// a gather depends on is the same on all ranks, whose passes may take more or fewer turns.
constexpr size_t kLeastUnitsOfAChain = 8;

void ResidentUnits::evict_for(const std::vector<Unit*>& needed, bool turns) {
  std::erase_if(recent_, [&](Unit* unit) { return std::find(needed.begin(), needed.end(), unit) != needed.end(); });
  if (!model_.options().reshard_after_forward) return;  // each goes when backward has all its gradients
  while (!recent_.empty() && recent_.size() + needed.size() > static_cast<size_t>(model_.options().keep_recent))
    release(*recent_.front());
  if (!turns || model_.units().size() < kLeastUnitsOfAChain) return;
  for (Unit* unit : std::vector<Unit*>(recent_))
    if (!unit->may_gather_ahead()) release(*unit);
}

void ResidentUnits::prefetch(const PrefetchOrder& order) {
  const int count = model_.options().prefetch;
  if (model_.offload().has_disk())
    for (int index : order.upcoming(count + 2)) model_.units()[index]->read_ahead();
  if (model_.options().offload.params)  // the nearest first, so that its copy is not behind another's
    for (int index : order.upcoming(count + 1)) model_.units()[index]->start_fetch();
  for (int index : order.upcoming(count))
    if (Unit& unit = *model_.units()[index]; unit.may_gather_ahead()) unit.start_gather();
}

void ResidentUnits::release(Unit& unit) {
  std::erase(recent_, &unit);
  if (!unit.is_pinned()) unit.release();
}

void ResidentUnits::release_all() {
  if (!accumulates_) drop_secondaries();
  for (auto& unit : model_.units()) {
    release(*unit);
    unit->set_current(Page::GradMode::kNone);
  }
  current_.clear();
  recent_.clear();
}

void ResidentUnits::set_current(std::vector<Unit*> units, Page::GradMode mode) {
  for (Unit* unit : current_) unit->set_current(Page::GradMode::kNone);
  current_ = std::move(units);
  for (Unit* unit : current_) unit->set_current(mode);
}

// A unit computes from its use on until another's, or the end of the pass; waits for gradients of others lie within.
void ResidentUnits::computing_ends() {
  if (computing_.empty()) return;
  Trace::active()->add(SpanKind::kCompute, computing_, inside_backward() ? "backward" : "forward", computing_since_,
                       Trace::Clock::now());
  computing_.clear();
}

void ResidentUnits::describe(std::ostream& text) const {
  describe(text, "forward", forward_order_);
  describe(text, "backward", backward_order_);
}

void ResidentUnits::describe(std::ostream& text, const char* pass, const PrefetchOrder& order) const {
  const auto& seen = order.seen().empty() ? order.expected() : order.seen();
  if (seen.empty()) return;
  text << "  order seen in " << pass << ":";
  for (size_t i = 0; i < seen.size(); ++i) text << (i == 0 ? " " : ", ") << model_.units()[seen[i]]->name();
  text << "\n";
}

}  // namespace tessera::internal
