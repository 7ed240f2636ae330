#include "tessera/flat/gradient_reducer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "tessera/comm/agreement.h"
#include "tessera/comm/backend_all_reduce.h"

namespace tessera {
namespace {

constexpr int64_t kFingerprintBytes = 8;
constexpr const char* kOperations[] = {"reduce-scatter", "reduce", "all-reduce"};  // by FlatLayout::Cut

bool all_of(const std::vector<bool>& flags) {
  return std::all_of(flags.begin(), flags.end(), [](bool flag) { return flag; });
}

// Complex numbers travel as pairs.
at::Tensor travelling(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor).view({-1}) : tensor;
}

// Bits of the end-of-backward report: one a parameter that was used, then one a bucket with late gradients.
void set_bit(uint8_t* bytes, size_t bit) { bytes[bit / 8] |= static_cast<uint8_t>(1U << (bit % 8)); }
bool has_bit(const uint8_t* bytes, size_t bit) { return (bytes[bit / 8] >> (bit % 8) & 1) != 0; }

}  // namespace

GradientReducer::GradientReducer(const std::vector<PlannedParameter>& parameters, const Mesh& mesh, OrderLog& log,
                                 ReducerOptions options)
    : parameters_(parameters),
      mesh_(mesh),
      log_(log),
      options_(options),
      buffers_(mesh.world->device()),
      states_(parameters.size()) {}

void GradientReducer::set_buckets(std::vector<GradientBucket> buckets) {
  buckets_ = std::move(buckets);
  contents_.assign(buckets_.size(), {});
  reduced_.assign(buckets_.size(), false);
  states_.assign(parameters_.size(), {});
  static_use_.clear();
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    const auto& members = buckets_[bucket].members;
    contents_[bucket].content.filled.assign(members.size(), false);
    contents_[bucket].late.filled.assign(members.size(), false);
    for (size_t member = 0; member < members.size(); ++member) {
      states_[members[member]].bucket = bucket;
      states_[members[member]].member = member;
    }
  }
}

// ---- gradients ----------------------------------------------------------------------------------

void GradientReducer::begin(const std::vector<size_t>& order) {
  arrivals_.clear();
  queue_.clear();
  started_ = 0;
  for (size_t i = 0; i < states_.size(); ++i) {
    states_[i].arrived = false;
    states_[i].used = keeps(i);
  }
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    BucketState& state = contents_[bucket];
    state.queued = state.started = false;
    reduced_[bucket] = false;
    state.missing = std::count_if(buckets_[bucket].members.begin(), buckets_[bucket].members.end(),
                                  [&](size_t parameter) { return parameters_[parameter].tensor.requires_grad(); });
  }
  auto enqueue = [&](size_t bucket) {
    if (!std::exchange(contents_[bucket].queued, true)) queue_.push_back(bucket);
  };
  for (size_t bucket : order)
    if (contents_[bucket].missing > 0) enqueue(bucket);
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket)  // what earlier passes left
    if (contents_[bucket].content.flat.defined()) enqueue(bucket);
}

bool GradientReducer::add(size_t parameter, const at::Tensor& gradient, bool reduce) {
  ParameterState& state = states_[parameter];
  BucketState& bucket = contents_[state.bucket];
  if (!std::exchange(bucket.queued, true)) queue_.push_back(state.bucket);  // not foreseen: it takes its turn last
  if (gradient.defined()) collect(parameter, gradient.is_sparse() ? gradient.to_dense() : gradient);
  if (std::exchange(state.arrived, true)) return bucket.missing == 0;  // again, by a part that is computed again
  arrivals_.push_back(parameter);
  if (bucket.missing > 0) --bucket.missing;
  if (bucket.missing > 0) return false;
  if (reduce) start_full_ones();
  return true;
}

void GradientReducer::collect(size_t parameter, const at::Tensor& gradient) {
  ParameterState& state = states_[parameter];
  BucketState& bucket = contents_[state.bucket];
  if (bucket.started && observer_)
    throw std::logic_error("the gradients of " + buckets_[state.bucket].name +
                           " come in several parts in one backward, and its step may have been taken after the first: "
                           "take the optimizer's step after backward instead (StepInBackward)");
  state.used = true;
  collect(bucket.started ? bucket.late : bucket.content, state.bucket, state.member, gradient);
}

void GradientReducer::collect(Content& content, size_t bucket, size_t member, const at::Tensor& gradient) {
  const GradientBucket& plan = buckets_[bucket];
  const bool is_first = !content.filled[member];
  content.filled[member] = true;
  if (is_first && !content.flat.defined()) {
    if (at::Tensor values = as_it_is(bucket, gradient); values.defined()) {
      content.flat = values;
      content.is_borrowed = true;
      borrowed_bytes_ += static_cast<int64_t>(values.nbytes());
      return note_bytes();
    }
  }
  if (content.is_borrowed) {  // it is autograd's: the sum needs memory of its own
    const at::Tensor first = std::exchange(content.flat, at::Tensor());
    content.is_borrowed = false;
    borrowed_bytes_ -= static_cast<int64_t>(first.nbytes());
    make_room(content, bucket);
    content.flat.copy_(first);
  }
  if (!content.flat.defined()) make_room(content, bucket);
  const at::Tensor place =
      view_in(content.flat, plan.geometries[member], plan.layout.offset(static_cast<int64_t>(member)));
  is_first ? place.copy_(gradient) : place.add_(gradient);
}

// A gradient that can be sent to its owner where it lies; else undefined.
at::Tensor GradientReducer::as_it_is(size_t bucket, const at::Tensor& gradient) const {
  const GradientBucket& plan = buckets_[bucket];
  if (plan.result != nullptr || plan.members.size() != 1 || gradient.scalar_type() != plan.dtype ||
      gradient.layout() != at::kStrided || gradient.strides() != at::IntArrayRef(plan.geometries[0].strides))
    return {};
  return gradient.as_strided({gradient.numel()}, {1}, gradient.storage_offset());
}

// Straight in the result's memory, where this rank gets all of the bucket and nothing stands in the way.
void GradientReducer::make_room(Content& content, size_t bucket) {
  const GradientBucket& plan = buckets_[bucket];
  const int64_t full_numel = plan.layout.full_numel();
  content.is_result = plan.result != nullptr && options_.to_host == nullptr && plan.result->numel() == full_numel &&
                      plan.result->dtype() == plan.dtype && plan.result->is_free() && !is_busy(bucket);
  content.flat = content.is_result ? plan.result->room() : buffers_.take(full_numel, plan.dtype);
  note_bytes();
}

bool GradientReducer::keeps(size_t parameter) const {
  const ParameterState& state = states_[parameter];
  return state.bucket != kNowhere && contents_[state.bucket].content.filled[state.member];
}

void GradientReducer::forget(size_t parameter) {
  if (!keeps(parameter)) return;
  Content& content = contents_[states_[parameter].bucket].content;
  content.filled[states_[parameter].member] = false;
  states_[parameter].used = false;
  if (std::none_of(content.filled.begin(), content.filled.end(), [](bool filled) { return filled; })) {
    if (content.is_borrowed) borrowed_bytes_ -= static_cast<int64_t>(content.flat.nbytes());
    content = {{}, false, false, std::move(content.filled)};
  }
}

// ---- reductions ---------------------------------------------------------------------------------

void GradientReducer::start_full_ones() {
  while (started_ < queue_.size() && contents_[queue_[started_]].missing == 0) start(queue_[started_++]);
}

// What no gradient has filled. Between members only where it comes into a shard's gradient, whose norm is taken whole.
void GradientReducer::fill_gaps(const GradientBucket& bucket, const Content& content) const {
  const FlatLayout& layout = bucket.layout;
  if (layout.cut() != FlatLayout::Cut::kEvenly) {
    for (size_t member = 0; member < bucket.members.size(); ++member)
      if (!content.filled[member])
        content.flat.narrow(0, layout.offset(static_cast<int64_t>(member)), layout.numel(static_cast<int64_t>(member)))
            .zero_();
    return;
  }
  int64_t end = 0;
  auto clear_to = [&](int64_t begin_of_next) {
    if (begin_of_next > end) content.flat.narrow(0, end, begin_of_next - end).zero_();
  };
  for (size_t member = 0; member < bucket.members.size(); ++member) {
    const auto index = static_cast<int64_t>(member);
    if (!content.filled[member]) continue;  // cleared with the gap that it lies in
    clear_to(layout.offset(index));
    end = layout.offset(index) + layout.numel(index);
  }
  clear_to(layout.full_numel());
}

void GradientReducer::start(size_t bucket) {
  const GradientBucket& plan = buckets_[bucket];
  BucketState& state = contents_[bucket];
  state.started = true;
  reduced_[bucket] = true;
  Flight flight{bucket,
                std::exchange(state.content, {{}, false, false, std::vector<bool>(plan.members.size(), false)})};
  if (!flight.content.flat.defined()) make_room(flight.content, bucket);
  if (!flight.content.is_borrowed) fill_gaps(plan, flight.content);
  log_.add(kOperations[static_cast<size_t>(plan.layout.cut())], plan.name, flight.content.flat.numel());
  flight.pending = reduce(flight);
  flights_[kReducing].push_back(std::move(flight));
  while (flights_[kReducing].size() > options_.in_flight) finish_oldest(kReducing);
}

Pending GradientReducer::reduce(Flight& flight) {
  const GradientBucket& plan = buckets_[flight.bucket];
  const at::Tensor& full = flight.content.flat;
  flight.wire = full;
  if (plan.wire_dtype && at::isFloatingType(full.scalar_type())) flight.wire = full.to(*plan.wire_dtype);
  const ReduceOp op = divisor_ ? ReduceOp::kSum : ReduceOp::kAverage;
  switch (plan.layout.cut()) {
    case FlatLayout::Cut::kWhole:
      flight.reduced = full;
      if (options_.backend_all_reduce) return backend_all_reduce(*mesh_.shard, travelling(flight.wire), plan.name);
      return mesh_.shard->all_reduce(travelling(flight.wire), op, plan.name);
    case FlatLayout::Cut::kByOwner:
      if (plan.owner == mesh_.shard->rank()) flight.reduced = full;
      return mesh_.shard->reduce(travelling(flight.wire), plan.owner, op, plan.name);
    case FlatLayout::Cut::kEvenly:
      break;
  }
  flight.reduced = flight.content.is_result ? full : plan.result->room(plan.dtype, is_busy(flight.bucket));
  at::Tensor received = flight.reduced;
  if (options_.to_host != nullptr)
    received = flight.staging = options_.staging->take(flight.reduced.numel(), flight.reduced.scalar_type());
  return mesh_.shard->reduce_scatter(travelling(received), travelling(flight.wire), op, {}, plan.name);
}

void GradientReducer::finish_oldest(Stage stage, bool accept) {
  Flight flight = std::move(flights_[stage].front());
  flights_[stage].pop_front();
  if (stage == kLeaving) {
    accept ? flight.leaving.wait_on_host() : static_cast<void>(flight.leaving = Copy());
    flight.staging.reset();
    if (accept) this->accept(std::move(flight));
    return;
  }
  flight.pending.wait();
  if (flight.content.is_borrowed) borrowed_bytes_ -= static_cast<int64_t>(flight.content.flat.nbytes());
  if (!accept || !flight.reduced.defined()) return;
  if (stage == kReducing) {
    if (!flight.wire.is_same(flight.content.flat) && flight.reduced.is_same(flight.content.flat))
      flight.reduced.copy_(flight.wire);
    flight.wire.reset();
    flight.content.flat.reset();
    if (options_.backend_all_reduce && !divisor_) flight.reduced.div_(mesh_.world->size());
    if (mesh_.replicas) {
      flight.pending =
          mesh_.replicas->all_reduce(travelling(flight.staging.defined() ? flight.staging : flight.reduced),
                                     divisor_ ? ReduceOp::kSum : ReduceOp::kAverage, buckets_[flight.bucket].name);
      flights_[kCrossing].push_back(std::move(flight));
      while (flights_[kCrossing].size() > options_.in_flight) finish_oldest(kCrossing);
      return;
    }
  }
  settle(std::move(flight));
}

// Exchanged with everyone: divided, and to the host or accepted.
void GradientReducer::settle(Flight flight) {
  if (divisor_) (flight.staging.defined() ? flight.staging : flight.reduced).div_(*divisor_);
  if (!flight.staging.defined()) return accept(std::move(flight));
  flight.leaving = options_.to_host->to_host(flight.reduced, flight.staging);
  flights_[kLeaving].push_back(std::move(flight));
  while (flights_[kLeaving].size() > options_.in_flight) finish_oldest(kLeaving);
}

void GradientReducer::accept(Flight flight) {
  const bool waits = std::any_of(undecided_.begin(), undecided_.end(),
                                 [&](const Flight& other) { return other.bucket == flight.bucket; });
  if (!all_of(flight.content.filled) || waits) return undecided_.push_back(std::move(flight));
  buckets_[flight.bucket].result->accept(flight.reduced, flight.content.filled);
  observe(flight.bucket, flight.content.filled);
}

void GradientReducer::drain(bool accept) {
  for (Stage stage : {kReducing, kCrossing, kLeaving})
    while (!flights_[stage].empty()) finish_oldest(stage, accept);
}

void GradientReducer::observe(size_t bucket, const std::vector<bool>& used) const {
  if (!observer_) return;
  const std::vector<at::Tensor> leaves = buckets_[bucket].result->leaves(used);
  if (!leaves.empty()) observer_(leaves);
}

// Whether a reduction of the bucket is under way: a part that is computed again has brought it more.
bool GradientReducer::is_busy(size_t bucket) const {
  auto same = [&](const Flight& flight) { return flight.bucket == bucket; };
  return std::any_of(undecided_.begin(), undecided_.end(), same) ||
         std::any_of(flights_.begin(), flights_.end(),
                     [&](const auto& stage) { return std::any_of(stage.begin(), stage.end(), same); });
}

void GradientReducer::note_bytes() { peak_bytes_ = std::max(peak_bytes_, bucket_bytes()); }

// ---- the end of a pass --------------------------------------------------------------------------

void GradientReducer::finish() {
  while (started_ < queue_.size()) start(queue_[started_++]);
  std::vector<bool> any_late(buckets_.size(), false);
  try {
    if (!static_use_.empty()) {
      require_same_use();
      drain();
      for (size_t i = 0; i < states_.size(); ++i) states_[i].used = static_use_[i];  // on any rank
      any_late = static_late_;
    } else {
      const at::Tensor own = own_report();
      at::Tensor reports = at::empty({mesh_.world->size() * own.numel()}, own.options());
      Pending exchange = mesh_.world->all_gather(reports, own, {}, "the end of backward");
      drain();
      exchange.wait();
      any_late = read_reports(reports);
    }
  } catch (const CommError&) {
    throw;
  } catch (const std::exception&) {
    log_.clear();
    reset();
    throw;
  }
  log_.clear();
  for (Flight& flight : std::exchange(undecided_, {})) {
    const std::vector<bool> used = used_in(flight.bucket);
    buckets_[flight.bucket].result->accept(flight.reduced, used);
    buckets_[flight.bucket].result->drop_if_unused();
    observe(flight.bucket, used);
  }
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    if (!any_late[bucket]) continue;
    contents_[bucket].content = std::exchange(contents_[bucket].late, {});
    contents_[bucket].content.filled.resize(buckets_[bucket].members.size(), false);
    start(bucket);
    drain();
    for (Flight& flight : std::exchange(undecided_, {}))
      buckets_[bucket].result->accept(flight.reduced, used_in(bucket));
  }
  if (options_.is_static && static_use_.empty()) {
    for (const ParameterState& state : states_) static_use_.push_back(state.used);
    static_late_ = any_late;
  }
  reset();
  if (options_.check_finite) check_finite();
}

std::vector<bool> GradientReducer::used_in(size_t bucket) const {
  std::vector<bool> used;
  for (size_t parameter : buckets_[bucket].members) used.push_back(states_[parameter].used);
  return used;
}

at::Tensor GradientReducer::own_report() const {
  std::vector<uint8_t> bytes(kFingerprintBytes + (states_.size() + buckets_.size() + 7) / 8, 0);
  const uint64_t value = log_.fingerprint();
  std::memcpy(bytes.data(), &value, sizeof(value));
  uint8_t* bits = bytes.data() + kFingerprintBytes;
  for (size_t i = 0; i < states_.size(); ++i)
    if (states_[i].used) set_bit(bits, i);
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket)
    if (contents_[bucket].late.flat.defined()) set_bit(bits, states_.size() + bucket);
  at::Tensor report = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::memcpy(report.mutable_data_ptr(), bytes.data(), bytes.size());
  return report.to(mesh_.world->device());
}

std::vector<bool> GradientReducer::read_reports(const at::Tensor& reports) {
  const at::Tensor table = reports.cpu().view({mesh_.world->size(), -1});
  std::vector<bool> any_late(buckets_.size(), false);
  bool agreed = true;
  for (int rank = 0; rank < mesh_.world->size(); ++rank) {
    const auto* report = table[rank].const_data_ptr<uint8_t>();
    agreed = agreed && std::memcmp(report, table.const_data_ptr<uint8_t>(), kFingerprintBytes) == 0;
    const uint8_t* bits = report + kFingerprintBytes;
    for (size_t i = 0; i < states_.size(); ++i) states_[i].used = states_[i].used || has_bit(bits, i);
    for (size_t bucket = 0; bucket < buckets_.size(); ++bucket)
      any_late[bucket] = any_late[bucket] || has_bit(bits, states_.size() + bucket);
  }
  if (!agreed) require_agreement(*mesh_.world, "what was gathered and reduced since the last backward", log_.lines());
  if (options_.refuse_uneven_use) check_even_use(table);
  return any_late;
}

void GradientReducer::check_even_use(const at::Tensor& table) const {
  for (size_t i = 0; i < states_.size(); ++i) {
    if (!states_[i].used) continue;
    for (int rank = 0; rank < mesh_.world->size(); ++rank)
      if (!has_bit(table[rank].const_data_ptr<uint8_t>() + kFingerprintBytes, i))
        throw std::invalid_argument("parameter '" + parameters_[i].fqn + "' of " + buckets_[states_[i].bucket].name +
                                    " had no gradient on rank " + std::to_string(rank) +
                                    ", but had one on others (FsdpOptions::refuse_uneven_use)");
  }
}

// With a static graph each rank looks for itself.
void GradientReducer::require_same_use() const {
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket)
    if (contents_[bucket].late.flat.defined() && !static_late_[bucket])
      throw std::logic_error(buckets_[bucket].name + " on rank " + std::to_string(mesh_.world->rank()) +
                             " came in several parts, but in one on every rank in the first backward, and static_graph "
                             "promises that every iteration is the same");
  for (size_t i = 0; i < states_.size(); ++i)
    if (states_[i].used && !static_use_[i])
      throw std::logic_error("parameter '" + parameters_[i].fqn + "' on rank " + std::to_string(mesh_.world->rank()) +
                             " has a gradient, but had none on any rank in the first backward, and static_graph "
                             "promises that every iteration is the same");
}

// Buckets in which some rank's part of the reduced gradient is not finite: a row of flags a rank.
void GradientReducer::check_finite() {
  at::Tensor own = at::zeros({static_cast<int64_t>(buckets_.size())}, at::kByte);
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    if (!reduced_[bucket] || buckets_[bucket].result == nullptr) continue;
    for (const at::Tensor& leaf : buckets_[bucket].result->leaves())
      if (leaf.grad().defined() && !at::isfinite(leaf.grad()).all().item<bool>())
        own.mutable_data_ptr<uint8_t>()[bucket] = 1;
  }
  const int world = mesh_.world->size();
  own = own.to(mesh_.world->device());
  at::Tensor all = at::empty({world * own.numel()}, own.options());
  mesh_.world->all_gather(all, own, {}, "the check for finite gradients").wait();
  all = all.cpu();
  std::string found;
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    std::string ranks;
    for (int rank = 0; rank < world; ++rank)
      if (all.const_data_ptr<uint8_t>()[rank * buckets_.size() + bucket] != 0)
        ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    if (!ranks.empty())
      found += (found.empty() ? "" : "; ") + buckets_[bucket].name + " in the parts of ranks " + ranks;
  }
  if (!found.empty())
    throw std::runtime_error("reduced gradients are infinite or NaN (FsdpOptions::check_finite): " + found);
}

void GradientReducer::end_without_reducing() {
  queue_.clear();
  started_ = 0;
  for (BucketState& state : contents_) state.queued = false;
}

void GradientReducer::abandon() {
  drain(/*accept=*/false);
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    const std::vector<bool> none(buckets_[bucket].members.size(), false);
    contents_[bucket].content = contents_[bucket].late = {{}, false, false, none};
  }
  borrowed_bytes_ = 0;
  for (ParameterState& state : states_) state.used = false;
  reset();
}

void GradientReducer::reset() {
  undecided_.clear();
  queue_.clear();
  started_ = 0;
  for (BucketState& state : contents_) {
    state.queued = state.started = false;
    state.late = {{}, false, false, std::vector<bool>(state.content.filled.size(), false)};
  }
}

}  // namespace tessera
