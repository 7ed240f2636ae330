#include "tessera/fsdp/gradient_reducer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "tessera/comm/agreement.h"

namespace tessera {
namespace {

// Reduce-scatters under way at a time: one in transit while the next bucket fills up.
constexpr size_t kMaxInFlight = 2;
constexpr int64_t kFingerprintBytes = 8;

}  // namespace

GradientReducer::GradientReducer(const ShardingGroups& groups, std::vector<std::unique_ptr<Unit>>& units, OrderLog& log,
                                 ReducerChecks checks, GradientSink sink)
    : groups_(groups),
      log_(log),
      checks_(checks),
      sink_(sink),
      units_(units),
      pool_(groups.world->device()),
      states_(units.size()),
      reduced_(units.size()),
      announced_(units.size()) {
  size_t parameters = 0;
  for (auto& unit : units_) {
    reduced_[unit->index()].assign(unit->groups().size(), false);
    announced_[unit->index()] = reduced_[unit->index()];
    for (auto& group : unit->groups()) {
      GroupState state;
      state.filled.assign(group->flat.parameters().size(), false);
      state.arrived = state.filled;
      state.first_parameter = std::exchange(parameters, parameters + state.filled.size());
      states_[unit->index()].groups.push_back(std::move(state));
    }
  }
  used_.assign(parameters, false);
}

void GradientReducer::expect(Unit& unit) {
  UnitState& state = states_[unit.index()];
  if (std::exchange(state.expected, true)) return;
  first_uses_.push_back(unit.index());
}

void GradientReducer::begin_backward() {
  for (auto& unit : units_) {
    UnitState& state = states_[unit->index()];
    state.missing = unit->trainable_count();
    state.complete = false;
    for (GroupState& group : state.groups) std::fill(group.arrived.begin(), group.arrived.end(), false);
  }
  for (auto index = first_uses_.rbegin(); index != first_uses_.rend(); ++index)
    if (states_[*index].missing > 0) enqueue(*units_[*index]);
  for (auto& unit : units_)  // what earlier backwards left under no_sync
    for (const GroupState& group : states_[unit->index()].groups)
      if (group.bucket.defined()) enqueue(*unit);
}

void GradientReducer::end_without_reducing() {
  queue_.clear();
  started_ = 0;
  for (UnitState& state : states_) state.queued = false;
}

void GradientReducer::enqueue(Unit& unit) {
  UnitState& state = states_[unit.index()];
  if (std::exchange(state.queued, true)) return;
  queue_.push_back(unit.index());
}

bool GradientReducer::add(Unit& unit, size_t group, size_t parameter, const at::Tensor& gradient, bool reduce) {
  UnitState& state = states_[unit.index()];
  GroupState& bucket = state.groups[group];
  const FlatGroup& flat = unit.groups()[group]->flat;
  if (!state.queued) {
    // Forward did not announce the unit, or it was reduced already and a backward within this one
    // brings more: it takes its turn last.
    enqueue(unit);
    state.complete = false;
  }
  if (gradient.defined()) {
    if (!bucket.bucket.defined()) bucket.bucket = pool_.take(flat.bucket_bytes()).view(flat.reduce_dtype());
    at::Tensor place = flat.view_in(bucket.bucket, parameter);
    const at::Tensor values = gradient.is_sparse() ? gradient.to_dense() : gradient;
    if (bucket.filled[parameter]) {
      place.add_(values);
    } else {
      place.copy_(values);
      bucket.filled[parameter] = true;
    }
    used_[bucket.first_parameter + parameter] = true;
  }
  if (bucket.arrived[parameter]) return state.complete;  // again, by a backward within this one
  bucket.arrived[parameter] = true;
  if (--state.missing > 0) return false;
  state.complete = true;
  if (reduce) start_complete_ones();
  return true;
}

void GradientReducer::start_complete_ones() {
  while (started_ < queue_.size() && states_[queue_[started_]].complete) start_reduce(*units_[queue_[started_++]]);
}

void GradientReducer::start_reduce(Unit& unit) {
  UnitState& state = states_[unit.index()];
  state.queued = false;
  for (size_t i = 0; i < state.groups.size(); ++i) {
    GroupState& group = state.groups[i];
    FlatGroup& flat = unit.groups()[i]->flat;
    const auto& parameters = flat.parameters();
    const bool trainable = std::any_of(parameters.begin(), parameters.end(),
                                       [](const PlannedParameter& p) { return p.tensor.requires_grad(); });
    if (!trainable && !group.bucket.defined()) continue;
    if (observer_ && announced_[unit.index()][i])
      throw std::logic_error(
          "the gradients of " + flat.name() +
          " come in several parts in one backward, and its step may have been taken after the first: take the "
          "optimizer's step after backward instead (StepInBackward)");
    announced_[unit.index()][i] = true;
    if (!group.bucket.defined()) group.bucket = pool_.take(flat.bucket_bytes()).view(flat.reduce_dtype());
    flat.clear_padding(group.bucket);
    for (size_t p = 0; p < parameters.size(); ++p)
      if (!group.filled[p]) flat.view_in(group.bucket, p).zero_();
    InFlight flight{
        &unit,        i, std::exchange(group.bucket, at::Tensor()), flat.gradient_destination(is_busy(unit, i)),
        group.filled, {}};
    std::fill(group.filled.begin(), group.filled.end(), false);
    reduced_[unit.index()][i] = true;
    log_.add("reduce-scatter", flat.name(), flight.bucket.numel());
    if (sink_.engine != nullptr)
      flight.staging = sink_.staging->take(static_cast<int64_t>(flight.reduced.nbytes())).view(flat.reduce_dtype());
    const at::Tensor& received = sink_.engine != nullptr ? flight.staging : flight.reduced;
    flight.pending = groups_.shard->reduce_scatter(received, flight.bucket, ReduceOp::kAverage, {}, flat.name());
    in_flight_.push_back(std::move(flight));
  }
  while (in_flight_.size() > kMaxInFlight) finish_oldest();
}

void GradientReducer::finish_oldest(bool accept) {
  InFlight flight = std::move(in_flight_.front());
  in_flight_.erase(in_flight_.begin());
  flight.pending.wait();
  pool_.give(flight.bucket.view(at::kByte));
  if (!accept) {
    if (flight.staging.defined()) sink_.staging->give(flight.staging.view(at::kByte));
    return;
  }
  flight.bucket.reset();
  if (!groups_.replicas) return settle(std::move(flight));
  flight.pending = groups_.replicas->all_reduce(flight.staging.defined() ? flight.staging : flight.reduced,
                                                ReduceOp::kAverage, flight.unit->groups()[flight.group]->flat.name());
  crossing_.push_back(std::move(flight));
  while (crossing_.size() > kMaxInFlight) finish_oldest_crossing();
}

void GradientReducer::finish_oldest_crossing(bool accept) {
  InFlight flight = std::move(crossing_.front());
  crossing_.erase(crossing_.begin());
  flight.pending.wait();
  if (accept) return settle(std::move(flight));
  if (flight.staging.defined()) sink_.staging->give(flight.staging.view(at::kByte));
}

void GradientReducer::settle(InFlight flight) {
  if (!flight.staging.defined()) return accept(std::move(flight));
  flight.leaving = sink_.engine->to_host(flight.reduced, flight.staging);
  leaving_.push_back(std::move(flight));
  while (leaving_.size() > kMaxInFlight) finish_oldest_leaving();
}

void GradientReducer::finish_oldest_leaving(bool accept) {
  InFlight flight = std::move(leaving_.front());
  leaving_.erase(leaving_.begin());
  auto give_back = [&] {
    flight.leaving = Copy();  // which waits until the copy has gone, or failed
    sink_.staging->give(std::exchange(flight.staging, at::Tensor()).view(at::kByte));
  };
  try {
    if (accept) flight.leaving.wait_on_host();
  } catch (...) {
    give_back();
    throw;
  }
  give_back();
  if (accept) this->accept(std::move(flight));
}

void GradientReducer::accept(InFlight flight) {
  const bool waits = std::any_of(undecided_.begin(), undecided_.end(), [&](const Undecided& other) {
    return other.unit == flight.unit && other.group == flight.group;
  });
  const bool all_used = std::all_of(flight.filled.begin(), flight.filled.end(), [](bool filled) { return filled; });
  if (all_used && !waits) {
    flight.unit->groups()[flight.group]->flat.accept_gradient(flight.reduced, flight.filled);
    observe(*flight.unit, flight.group, flight.filled);
  } else {
    undecided_.push_back({flight.unit, flight.group, flight.reduced});
  }
}

void GradientReducer::observe(const Unit& unit, size_t group, const std::vector<bool>& used) const {
  if (!observer_) return;
  std::vector<at::Tensor> shards;
  for (size_t i = 0; i < used.size(); ++i)
    if (used[i]) shards.push_back(unit.groups()[group]->flat.parameter_shards()[i]);
  if (!shards.empty()) observer_(shards);
}

// Whether a reduction of the group is under way: a backward within this one has brought it more.
bool GradientReducer::is_busy(const Unit& unit, size_t group) const {
  auto same = [&](const auto& other) { return other.unit == &unit && other.group == group; };
  return std::any_of(in_flight_.begin(), in_flight_.end(), same) ||
         std::any_of(crossing_.begin(), crossing_.end(), same) || std::any_of(leaving_.begin(), leaving_.end(), same) ||
         std::any_of(undecided_.begin(), undecided_.end(), same);
}

void GradientReducer::finish() {
  while (started_ < queue_.size()) start_reduce(*units_[queue_[started_++]]);
  const at::Tensor own = own_report();
  at::Tensor reports = at::empty({groups_.world->size() * own.numel()}, own.options());
  Pending exchange = groups_.world->all_gather(reports, own, {}, "the end of backward");
  while (!in_flight_.empty()) finish_oldest();
  while (!crossing_.empty()) finish_oldest_crossing();
  while (!leaving_.empty()) finish_oldest_leaving();
  exchange.wait();
  try {
    check_reports(reports);
  } catch (const std::exception&) {
    log_.clear();
    reset_expectations();
    throw;
  }
  for (const Undecided& entry : undecided_) {
    FlatGroup& flat = entry.unit->groups()[entry.group]->flat;
    const size_t first = states_[entry.unit->index()].groups[entry.group].first_parameter;
    const auto begin = used_.begin() + static_cast<std::ptrdiff_t>(first);
    const std::vector<bool> used(begin, begin + static_cast<std::ptrdiff_t>(flat.parameters().size()));
    flat.accept_gradient(entry.reduced, used);
    flat.drop_unused_gradient();
    observe(*entry.unit, entry.group, used);
  }
  reset_expectations();
  if (checks_.finite) check_finite();
}

// The fingerprint of what was exchanged in which order, then a bit for each parameter.
at::Tensor GradientReducer::own_report() const {
  std::vector<uint8_t> bytes(kFingerprintBytes + (used_.size() + 7) / 8, 0);
  const uint64_t value = log_.fingerprint();
  std::memcpy(bytes.data(), &value, sizeof(value));
  for (size_t i = 0; i < used_.size(); ++i)
    if (used_[i]) bytes[kFingerprintBytes + i / 8] |= static_cast<uint8_t>(1U << (i % 8));
  at::Tensor report = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::memcpy(report.mutable_data_ptr(), bytes.data(), bytes.size());
  return report.to(groups_.world->device());
}

void GradientReducer::check_reports(const at::Tensor& reports) {
  const at::Tensor table = reports.cpu().view({groups_.world->size(), -1});
  bool agreed = true;
  for (int rank = 0; rank < groups_.world->size(); ++rank) {
    const auto* report = table[rank].const_data_ptr<uint8_t>();
    agreed = agreed && std::memcmp(report, table.const_data_ptr<uint8_t>(), kFingerprintBytes) == 0;
    for (size_t i = 0; i < used_.size(); ++i)
      if ((report[kFingerprintBytes + i / 8] >> (i % 8) & 1) != 0) used_[i] = true;
  }
  if (!agreed) require_agreement(*groups_.world, "what was gathered and reduced since the last backward", log_.lines());
  log_.clear();
  if (checks_.uneven_use) check_uneven_use(table);
}

void GradientReducer::check_uneven_use(const at::Tensor& table) {
  for (const auto& unit : units_) {
    for (size_t g = 0; g < unit->groups().size(); ++g) {
      const auto& parameters = unit->groups()[g]->flat.parameters();
      for (size_t p = 0; p < parameters.size(); ++p) {
        const size_t bit = states_[unit->index()].groups[g].first_parameter + p;
        if (!used_[bit]) continue;
        for (int rank = 0; rank < groups_.world->size(); ++rank) {
          if ((table[rank].const_data_ptr<uint8_t>()[kFingerprintBytes + bit / 8] >> (bit % 8) & 1) != 0) continue;
          throw std::invalid_argument("parameter '" + parameters[p].fqn + "' of " + unit->name() +
                                      " had no gradient on rank " + std::to_string(rank) +
                                      ", but had one on others (FsdpOptions::refuse_uneven_use)");
        }
      }
    }
  }
}

// Groups in which some rank's part of the reduced gradient is not finite: a row of bits a rank.
void GradientReducer::check_finite() {
  std::vector<const FlatGroup*> groups;
  for (const auto& unit : units_)
    for (const auto& group : unit->groups()) groups.push_back(&group->flat);
  at::Tensor own = at::zeros({static_cast<int64_t>(groups.size())}, at::kByte);
  size_t index = 0;
  for (auto& unit : units_) {
    for (size_t g = 0; g < unit->groups().size(); ++g, ++index) {
      if (!reduced_[unit->index()][g]) continue;
      reduced_[unit->index()][g] = false;
      for (const at::Tensor& shard : unit->groups()[g]->flat.parameter_shards())
        if (shard.grad().defined() && !at::isfinite(shard.grad()).all().item<bool>())
          own.mutable_data_ptr<uint8_t>()[index] = 1;
    }
  }
  const int world = groups_.world->size();
  own = own.to(groups_.world->device());
  at::Tensor all = at::empty({world * own.numel()}, own.options());
  groups_.world->all_gather(all, own, {}, "the check for finite gradients").wait();
  all = all.cpu();
  std::string found;
  for (size_t i = 0; i < groups.size(); ++i) {
    std::string ranks;
    for (int rank = 0; rank < world; ++rank)
      if (all.const_data_ptr<uint8_t>()[rank * groups.size() + i] != 0)
        ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    if (!ranks.empty()) found += (found.empty() ? "" : "; ") + groups[i]->name() + " in the parts of ranks " + ranks;
  }
  if (!found.empty())
    throw std::runtime_error("reduced gradients are infinite or NaN (FsdpOptions::check_finite): " + found);
}

void GradientReducer::abandon() {
  while (!in_flight_.empty()) finish_oldest(/*accept=*/false);
  while (!crossing_.empty()) finish_oldest_crossing(/*accept=*/false);
  while (!leaving_.empty()) finish_oldest_leaving(/*accept=*/false);
  for (UnitState& state : states_) {
    for (GroupState& group : state.groups) {
      if (group.bucket.defined()) pool_.give(std::exchange(group.bucket, at::Tensor()).view(at::kByte));
      std::fill(group.filled.begin(), group.filled.end(), false);
    }
  }
  reset_expectations();
}

void GradientReducer::reset_expectations() {
  undecided_.clear();
  queue_.clear();
  started_ = 0;
  first_uses_.clear();
  for (UnitState& state : states_) state.expected = state.queued = false;
  std::fill(used_.begin(), used_.end(), false);
  for (auto& groups : announced_) std::fill(groups.begin(), groups.end(), false);
}

}  // namespace tessera
