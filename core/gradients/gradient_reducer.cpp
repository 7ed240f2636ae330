#include "core/gradients/gradient_reducer.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/comm/backend_all_reduce.h"
#include "core/comm/reduce_scatter_pieces.h"
#include "core/gradients/finite_check.h"
#include "core/runtime/lazy_values.h"

namespace tessera::internal {
namespace {

constexpr const char* kOperations[] = {"reduce-scatter", "reduce", "all-reduce"};  // by FlatLayout::Cut

bool all_of(const std::vector<bool>& flags) {
  return std::all_of(flags.begin(), flags.end(), [](bool flag) { return flag; });
}

// Whether nobody else has the gradient or a part of its memory. A view, such as the transposed product that a linear
// layer's weight gets, has its base: another tensor of the same memory, which is then nobody else's either.
bool is_held_once(const at::Tensor& gradient) {
  const bool has_base = gradient.is_view() && gradient._base().use_count() == 1;
  return gradient.use_count() == 1 && gradient.storage().use_count() == (has_base ? 2 : 1);
}

// Complex numbers travel as pairs.
at::Tensor travelling(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor).view({-1}) : tensor;
}

}  // namespace

GradientReducer::GradientReducer(const std::vector<PlannedParameter>& parameters, const Mesh& mesh, OrderLog& log,
                                 ReducerOptions options)
    : parameters_(parameters),
      mesh_(mesh),
      log_(log),
      options_(options),
      buffers_(mesh.world->device(), MemoryKind::kBuckets),
      states_(parameters.size()),
      used_(parameters.size(), false),
      reports_(parameters, buckets_, mesh, log, {options.refuse_uneven_use, options.is_static}) {}

void GradientReducer::set_buckets(std::vector<GradientBucket> buckets) {
  buckets_ = std::move(buckets);
  contents_.assign(buckets_.size(), {});
  reduced_.assign(buckets_.size(), false);
  states_.assign(parameters_.size(), {});
  used_.assign(parameters_.size(), false);
  reports_.forget_first_pass();
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    const auto& members = buckets_[bucket].members;
    cut(buckets_[bucket]);
    contents_[bucket].content = contents_[bucket].late = BucketContent::of_members(members.size());
    for (size_t member = 0; member < members.size(); ++member) {
      states_[members[member]].bucket = bucket;
      states_[members[member]].member = member;
    }
  }
}

// Worth a way of its own, and that may be taken: one parameter, as it is, to others that read where it lies.
bool GradientReducer::is_large(const GradientBucket& bucket) const {
  return bucket.members.size() == 1 && !bucket.wire_dtype && exchanges_pieces(*mesh_.shard) &&
         bucket.layout.full_numel() > 0 &&
         bucket.layout.full_numel() * static_cast<int64_t>(c10::elementSize(bucket.dtype)) >= least_piece_bytes;
}

// Cut by owner, a bucket of one large parameter is reduced into other memory than its gradients lie in, so that the
// owner's need not be copied either. The same on all ranks.
bool GradientReducer::reduces_apart(const GradientBucket& bucket) const {
  return bucket.layout.cut() == FlatLayout::Cut::kByOwner && is_large(bucket) && !is_encoded(bucket);
}

// Whole on all ranks, a bucket of one large parameter is its gradient itself, where that is nobody else's: no copy
// before, and no memory besides. On a device it may be of another stream than .grad is to be.
bool GradientReducer::adopts(const GradientBucket& bucket) const {
  return bucket.layout.cut() == FlatLayout::Cut::kWhole && is_large(bucket) && mesh_.world->device().is_cpu();
}

// Into pieces, of which gradients can be some as they are: where what comes is apart from what is sent, all of it in
// the bucket's own dtype. Cut by owner, the only member, of an owner that is another rank or reduces apart; whole, the
// only member of a bucket that adopts its gradient.
void GradientReducer::cut(GradientBucket& bucket) const {
  const FlatLayout& layout = bucket.layout;
  bucket.pieces = {{{0, layout.full_numel()}}};
  bucket.piece_of.assign(bucket.members.size(), 0);
  bucket.adopts = adopts(bucket);
  if (bucket.adopts) bucket.pieces[0].member = 0;
  if (layout.cut() == FlatLayout::Cut::kByOwner && bucket.members.size() == 1 &&
      (bucket.result == nullptr || reduces_apart(bucket)))
    bucket.pieces[0].member = 0;
  if (layout.cut() != FlatLayout::Cut::kEvenly || layout.full_numel() == 0 || bucket.wire_dtype || is_encoded(bucket) ||
      !exchanges_pieces(*mesh_.shard))
    return;
  bucket.pieces = cut_into_pieces(layout, static_cast<int64_t>(c10::elementSize(bucket.dtype)));
  size_t piece = 0;
  for (size_t member = 0; member < bucket.members.size(); ++member) {
    const int64_t begin = layout.offset(static_cast<int64_t>(member));
    while (piece + 1 < bucket.pieces.size() && begin >= bucket.pieces[piece].range.end) ++piece;
    bucket.piece_of[member] = piece;
  }
}

// ---- gradients ----------------------------------------------------------------------------------

void GradientReducer::begin(const std::vector<size_t>& order, bool frozen_too) {
  arrivals_.clear();
  queue_.clear();
  started_ = 0;
  for (size_t i = 0; i < states_.size(); ++i) {
    states_[i].arrived = false;
    used_[i] = keeps(i);
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
    if (frozen_too || contents_[bucket].missing > 0) enqueue(bucket);
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket)  // what earlier passes left
    if (contents_[bucket].content.is_begun()) enqueue(bucket);
}

bool GradientReducer::add(size_t parameter, const at::Tensor& gradient) {
  ParameterState& state = states_[parameter];
  BucketState& bucket = contents_[state.bucket];
  if (!std::exchange(bucket.queued, true)) queue_.push_back(state.bucket);  // not foreseen: it takes its turn last
  // A dense one itself, not a copy: as_it_is() asks who else has it.
  if (gradient.defined() && gradient.is_sparse())
    collect(parameter, gradient.to_dense());
  else if (gradient.defined() && has_lazy_values(gradient))
    collect(parameter, gradient.clone());
  else if (gradient.defined())
    collect(parameter, gradient);
  if (std::exchange(state.arrived, true)) return bucket.missing == 0;  // again, by a part that is computed again
  arrivals_.push_back(parameter);
  if (bucket.missing > 0) --bucket.missing;
  return bucket.missing == 0;
}

void GradientReducer::collect(size_t parameter, const at::Tensor& gradient) {
  ParameterState& state = states_[parameter];
  BucketState& bucket = contents_[state.bucket];
  if (bucket.started && observer_)
    throw std::logic_error("the gradients of " + buckets_[state.bucket].name +
                           " come in several parts in one backward, and its step may have been taken after the first: "
                           "take the optimizer's step after backward instead");
  used_[parameter] = true;
  collect(bucket.started ? bucket.late : bucket.content, state.bucket, state.member, gradient);
}

void GradientReducer::collect(BucketContent& content, size_t bucket, size_t member, const at::Tensor& gradient) {
  const GradientBucket& plan = buckets_[bucket];
  const size_t piece = plan.piece_of[member];
  const bool is_first = !content.filled[member];
  content.filled[member] = true;
  content.parts.resize(plan.pieces.size());
  if (!content.parts[piece].values.defined()) {
    if (const at::Tensor values = as_it_is(plan, member, gradient); values.defined()) {
      content.borrow(piece, values);
      borrowed_bytes_ += static_cast<int64_t>(values.nbytes());
      return note_bytes();
    }
    make_room(content, bucket, piece);
  }
  own(content, bucket, piece);
  if (is_first && BucketContent::may_wait(gradient)) return content.wait_for_more(member, gradient);
  if (!is_first) copy_waiting(content, bucket);
  content.put(plan, member, gradient, is_first);
}

void GradientReducer::copy_waiting(BucketContent& content, size_t bucket) const {
  content.copy_waiting(buckets_[bucket], parameters_, mesh_.world->rank());
}

// A gradient that can be sent from where it lies; else undefined. Not one that somebody else has, a hook say, who may
// write to it by way of data(), which no version tells of: autograd, too, keeps a copy of such a one.
at::Tensor GradientReducer::as_it_is(const GradientBucket& plan, size_t member, const at::Tensor& gradient) {
  if (plan.pieces[plan.piece_of[member]].member != member || gradient.scalar_type() != plan.dtype ||
      gradient.layout() != at::kStrided || gradient.is_inference() || !is_held_once(gradient) ||
      gradient.strides() != at::IntArrayRef(plan.geometries[member].strides))
    return {};
  if (plan.adopts && gradient.storage().nbytes() != gradient.nbytes()) return {};  // the rest would stay as long
  return gradient.as_strided({gradient.numel()}, {1}, gradient.storage_offset());
}

// What is borrowed gets memory of its own: for a sum, or for a later pass.
void GradientReducer::own(BucketContent& content, size_t bucket, size_t piece) {
  if (!content.parts[piece].is_borrowed) return;
  content.require_as_borrowed(buckets_[bucket], parameters_, mesh_.world->rank());
  const at::Tensor borrowed = std::exchange(content.parts[piece], {}).values;
  borrowed_bytes_ -= static_cast<int64_t>(borrowed.nbytes());
  content.uses.join();
  make_room(content, bucket, piece);
  content.parts[piece].values.copy_(borrowed);
}

// Straight in the result's memory, where this rank gets all of the bucket and nothing stands in the way.
void GradientReducer::make_room(BucketContent& content, size_t bucket, size_t piece) {
  const GradientBucket& plan = buckets_[bucket];
  const int64_t numel = plan.pieces[piece].range.numel();
  content.is_result = plan.pieces.size() == 1 && plan.result != nullptr && options_.to_host == nullptr &&
                      plan.result->numel() == numel && plan.result->dtype() == plan.dtype && plan.result->is_free() &&
                      !is_busy(bucket);
  content.parts[piece].values = content.is_result ? plan.result->room() : buffers_.take(numel, plan.dtype);
  content.uses.begin(content.parts[piece].values.device());
  note_bytes();
}

bool GradientReducer::keeps(size_t parameter) const {
  const ParameterState& state = states_[parameter];
  return state.bucket != kNowhere && contents_[state.bucket].content.filled[state.member];
}

void GradientReducer::forget(size_t parameter) {
  if (!keeps(parameter)) return;
  BucketContent& content = contents_[states_[parameter].bucket].content;
  used_[parameter] = false;
  borrowed_bytes_ -= content.borrowed_bytes();
  if (content.forget(buckets_[states_[parameter].bucket], states_[parameter].member))
    content = BucketContent::of_members(content.filled.size());
  borrowed_bytes_ += content.borrowed_bytes();
}

// ---- reductions ---------------------------------------------------------------------------------

void GradientReducer::start_full_ones() {
  while (started_ < queue_.size() && contents_[queue_[started_]].missing == 0) start(queue_[started_++]);
}

void GradientReducer::start(size_t bucket) {
  const GradientBucket& plan = buckets_[bucket];
  BucketState& state = contents_[bucket];
  state.started = true;
  reduced_[bucket] = true;
  Flight flight{bucket, std::exchange(state.content, BucketContent::of_members(plan.members.size()))};
  flight.content.parts.resize(plan.pieces.size());
  for (size_t piece = 0; piece < plan.pieces.size(); ++piece)
    if (!flight.content.parts[piece].values.defined()) make_room(flight.content, bucket, piece);
  copy_waiting(flight.content, bucket);
  flight.content.uses.join();
  // Between members only where it comes into a shard's gradient, whose norm is taken whole, or into a block, whose
  // scale is that of its largest element.
  flight.content.fill_gaps(plan, plan.layout.cut() == FlatLayout::Cut::kEvenly || is_encoded(plan));
  if (plan.adopts) adopt(flight.content, plan);
  log_.add(kOperations[static_cast<size_t>(plan.layout.cut())], plan.name, plan.layout.full_numel(), divisor_);
  flight.pending = reduce(flight);
  flights_[kReducing].push_back(std::move(flight));
  while (flights_[kReducing].size() > most_in_flight(plan)) finish_oldest(kReducing);
}

size_t GradientReducer::most_in_flight(const GradientBucket& bucket) const {
  const bool is_awaited = mesh_.shard->is_lazy(bucket.layout.full_numel());
  return is_awaited ? std::min(options_.max_lazy_in_flight, options_.in_flight) : options_.in_flight;
}

// What is borrowed is ours from now on, to be written.
void GradientReducer::adopt(BucketContent& content, const GradientBucket& plan) {
  BucketContent::Part& part = content.parts[0];
  if (!part.is_borrowed) return;
  content.require_as_borrowed(plan, parameters_, mesh_.world->rank());
  borrowed_bytes_ -= static_cast<int64_t>(part.values.nbytes());
  part.is_borrowed = false;
  content.is_adopted = true;
}

// What may be rounded, and goes to others.
bool GradientReducer::is_encoded(const GradientBucket& bucket) const {
  return bucket.wire == WireFormat::kInt8Blocks && at::isFloatingType(bucket.dtype) && mesh_.shard->size() > 1 &&
         bucket.layout.cut() != FlatLayout::Cut::kWhole;
}

// To the rank that a part belongs to, all of it or this rank's: an all-to-all of what each has rounded.
Pending GradientReducer::exchange_encoded(Flight& flight) {
  const GradientBucket& plan = buckets_[flight.bucket];
  const int world = mesh_.shard->size(), rank = mesh_.shard->rank();
  const bool is_even = plan.layout.cut() == FlatLayout::Cut::kEvenly;
  const at::Tensor& full = flight.content.parts[0].values;
  const int64_t part_numel = is_even ? plan.layout.shard_numel() : full.numel();
  const int64_t part_bytes = Int8Blocks().encoded_bytes(part_numel);
  std::vector<int64_t> send_counts(world, is_even ? part_bytes : 0), receive_counts(world, 0);
  send_counts[is_even ? rank : plan.owner] = part_bytes;
  if (is_even || plan.owner == rank) receive_counts.assign(world, part_bytes);
  flight.wire = buffers_.take(is_even ? world * part_bytes : part_bytes, at::kByte);
  for (int part = 0; part * part_bytes < flight.wire.numel(); ++part)
    Int8Blocks().encode(full.narrow(0, part * part_numel, part_numel),
                        flight.wire.narrow(0, part * part_bytes, part_bytes));
  flight.encoded = buffers_.take(receive_counts[rank] * world, at::kByte);
  note_bytes();
  return mesh_.shard->all_to_all(flight.encoded, flight.wire, std::move(receive_counts), std::move(send_counts),
                                 plan.name);
}

void GradientReducer::add_encoded(Flight& flight) {
  const at::Tensor& result = flight.staging.defined() ? flight.staging : flight.reduced;
  const at::Tensor sum = result.scalar_type() == at::kFloat ? result : at::empty_like(result, at::kFloat);
  const int world = mesh_.shard->size();
  const int64_t part_bytes = flight.encoded.numel() / world;
  Int8Blocks().decode(flight.encoded.narrow(0, 0, part_bytes), sum);
  for (int rank = 1; rank < world; ++rank)
    Int8Blocks().add(flight.encoded.narrow(0, rank * part_bytes, part_bytes), sum);
  if (!divisor_) sum.div_(world);
  if (!sum.is_same(result)) result.copy_(sum);
}

// A reduce-scatter of which the owner gets all.
Pending GradientReducer::reduce_apart(Flight& flight, ReduceOp op) {
  const GradientBucket& plan = buckets_[flight.bucket];
  const at::Tensor& full = flight.content.parts[0].values;
  std::vector<int64_t> counts(mesh_.shard->size(), 0);
  counts[plan.owner] = travelling(full).numel();
  at::Tensor received = full.narrow(0, 0, 0);
  if (plan.owner == mesh_.shard->rank())
    received = flight.reduced = flight.content.is_result ? full : plan.result->room(plan.dtype, is_busy(flight.bucket));
  return mesh_.shard->reduce_scatter(travelling(received), travelling(full), op, std::move(counts), plan.name);
}

Pending GradientReducer::reduce(Flight& flight) {
  const GradientBucket& plan = buckets_[flight.bucket];
  const at::Tensor& full = flight.content.parts[0].values;  // where it is in one piece
  const bool encoded = is_encoded(plan);
  flight.wire = full;
  if (plan.wire_dtype && at::isFloatingType(full.scalar_type())) flight.wire = full.to(*plan.wire_dtype);
  const ReduceOp op = divisor_ ? ReduceOp::kSum : ReduceOp::kAverage;
  switch (plan.layout.cut()) {
    case FlatLayout::Cut::kWhole:
      flight.reduced = full;
      if (options_.backend_all_reduce) return backend_all_reduce(*mesh_.shard, travelling(flight.wire), plan.name);
      return mesh_.shard->all_reduce(travelling(flight.wire), op, plan.name);
    case FlatLayout::Cut::kByOwner:
      if (reduces_apart(plan)) return reduce_apart(flight, op);
      if (plan.owner == mesh_.shard->rank()) flight.reduced = full;
      if (encoded) return exchange_encoded(flight);
      return mesh_.shard->reduce(travelling(flight.wire), plan.owner, op, plan.name);
    case FlatLayout::Cut::kEvenly:
      break;
  }
  flight.reduced = flight.content.is_result ? full : plan.result->room(plan.dtype, is_busy(flight.bucket));
  at::Tensor received = flight.reduced;
  if (options_.to_host != nullptr)
    received = flight.staging = options_.staging->take(flight.reduced.numel(), flight.reduced.scalar_type());
  if (encoded) return exchange_encoded(flight);
  std::vector<at::Tensor> pieces{travelling(flight.wire)};
  for (size_t piece = 1; piece < plan.pieces.size(); ++piece)
    pieces.push_back(travelling(flight.content.parts[piece].values));
  return reduce_scatter_pieces(*mesh_.shard, travelling(received), std::move(pieces), op, plan.name);
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
  borrowed_bytes_ -= flight.content.borrowed_bytes();
  if (accept) flight.content.require_as_borrowed(buckets_[flight.bucket], parameters_, mesh_.world->rank());
  for (const auto& part : flight.content.parts)  // whose stream need not be the current one
    if (part.is_borrowed && !part.values.is_cpu()) part.values.record_stream(current_stream(part.values.device()));
  if (!accept || !flight.reduced.defined()) return;
  if (stage == kReducing) {
    if (flight.encoded.defined())
      add_encoded(flight);
    else if (const at::Tensor& full = flight.content.parts.at(0).values;
             !flight.wire.is_same(full) && flight.reduced.is_same(full))
      flight.reduced.copy_(flight.wire);
    flight.wire.reset();
    flight.encoded.reset();
    flight.content.parts.clear();
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
  pass_on(std::move(flight));
}

// Exchanged with everyone: divided, and to the host or accepted.
void GradientReducer::pass_on(Flight flight) {
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
  hand_over(flight, flight.content.filled);
  observe(flight.bucket, flight.content.filled);
}

void GradientReducer::hand_over(const Flight& flight, const std::vector<bool>& used) {
  GradientBuffer& result = *buckets_[flight.bucket].result;
  flight.content.is_adopted ? result.adopt(flight.reduced) : result.accept(flight.reduced, used);
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

void GradientReducer::report(MemoryReport& report) const {
  report.bucket_bytes = bucket_bytes();
  report.peak_bucket_bytes = peak_bytes_;
}

void GradientReducer::note_bytes() { peak_bytes_ = std::max(peak_bytes_, bucket_bytes()); }

// ---- the end of a pass --------------------------------------------------------------------------

void GradientReducer::finish() {
  while (started_ < queue_.size()) start(queue_[started_++]);
  PassUse use{used_, {}};
  for (const BucketState& state : contents_) use.late.push_back(state.late.is_begun());
  try {
    use = reports_.exchange(std::move(use), [this] {
      drain();
      return !undecided_.empty();
    });
    used_ = use.used;
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
    hand_over(flight, used);
    buckets_[flight.bucket].result->drop_if_unused();
    observe(flight.bucket, used);
  }
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    if (!use.late[bucket]) continue;
    contents_[bucket].content =
        std::exchange(contents_[bucket].late, BucketContent::of_members(buckets_[bucket].members.size()));
    start(bucket);
    drain();
    for (Flight& flight : std::exchange(undecided_, {})) hand_over(flight, used_in(bucket));
  }
  reset();
  if (options_.check_finite) require_finite(buckets_, reduced_, *mesh_.world);
}

std::vector<bool> GradientReducer::used_in(size_t bucket) const {
  std::vector<bool> used;
  for (size_t parameter : buckets_[bucket].members) used.push_back(used_[parameter]);
  return used;
}

void GradientReducer::end_without_reducing() {
  queue_.clear();
  started_ = 0;
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    BucketContent& content = contents_[bucket].content;  // autograd's memory is not kept from pass to pass
    copy_waiting(content, bucket);
    for (size_t piece = 0; piece < content.parts.size(); ++piece) own(content, bucket, piece);
    contents_[bucket].queued = false;
  }
}

void GradientReducer::abandon() {
  drain(/*accept=*/false);
  log_.clear();
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    contents_[bucket].content = contents_[bucket].late = BucketContent::of_members(buckets_[bucket].members.size());
  }
  borrowed_bytes_ = 0;
  used_.assign(used_.size(), false);
  reset();
}

void GradientReducer::reset() {
  undecided_.clear();
  queue_.clear();
  started_ = 0;
  for (BucketState& state : contents_) {
    state.queued = state.started = false;
    state.late = BucketContent::of_members(state.content.filled.size());
  }
}

}  // namespace tessera::internal
