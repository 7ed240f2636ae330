#include "core/gradients/reduction_queue.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <utility>

#include "core/comm/backend_all_reduce.h"
#include "core/comm/reduce_scatter_pieces.h"

namespace tessera {
namespace {

constexpr const char* kOperations[] = {"reduce-scatter", "reduce", "all-reduce"};  // by FlatLayout::Cut

// Collectives take complex numbers as pairs.
at::Tensor travelling(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor).view({-1}) : tensor;
}

}  // namespace

// ---- order --------------------------------------------------------------------------------------

void ReductionQueue::clear_order() {
  order_.clear();
  states_.assign(buckets_.size(), BucketState::kIdle);
}

void ReductionQueue::enqueue(size_t bucket) {
  if (states_[bucket] != BucketState::kIdle) return;
  states_[bucket] = BucketState::kQueued;
  order_.push_back(bucket);
}

std::vector<bool> ReductionQueue::reduced() const {
  std::vector<bool> reduced;
  for (const BucketState state : states_) reduced.push_back(state == BucketState::kReduced);
  return reduced;
}

bool ReductionQueue::is_busy(size_t bucket) const {
  return std::ranges::any_of(stages_, [&](const auto& stage) {
    return std::ranges::any_of(stage, [&](const PendingReduction& other) { return other.bucket == bucket; });
  });
}

// ---- start --------------------------------------------------------------------------------------

void ReductionQueue::reduce(size_t bucket, BucketContent content) {
  const GradientBucket& plan = buckets_[bucket];
  if (next() == bucket) order_.pop_front();
  states_[bucket] = BucketState::kReduced;
  log_.add(kOperations[static_cast<size_t>(plan.layout.cut())], plan.name, plan.layout.full_numel(), divisor_);
  const BucketContent::Memory memory = content.parts[0].memory;
  PendingReduction reduction{bucket, std::move(content), memory};
  switch (plan.layout.cut()) {
    case FlatLayout::Cut::kWhole:
      reduction.pending = all_reduce(reduction);
      break;
    case FlatLayout::Cut::kByOwner:
      reduction.pending = reduce_to_owner(reduction);
      break;
    case FlatLayout::Cut::kEvenly:
      reduction.pending = reduce_scatter(reduction);
      break;
  }
  push(kReducing, std::move(reduction), most_in_flight(plan));
}

size_t ReductionQueue::most_in_flight(const GradientBucket& bucket) const {
  const bool is_awaited = mesh_.shard->moves_only_when_awaited(bucket.layout.full_numel());
  return is_awaited ? std::min(options_.awaited_in_flight, options_.in_flight) : options_.in_flight;
}

// The first part as a tensor that a collective can sum.
at::Tensor ReductionQueue::encoded(PendingReduction& reduction) const {
  const WireCodec& codec = *buckets_[reduction.bucket].codec;
  const at::Tensor& full = reduction.content.parts[0].values;
  if (codec.is_identity()) return travelling(full);
  reduction.wire = at::empty({codec.encoded_bytes(full.numel())}, full.options().dtype(at::kByte));
  codec.encode(full, reduction.wire);
  return reduction.wire.view(*codec.sum_dtype());
}

// The result's memory, or other memory if that is in use.
at::Tensor ReductionQueue::room_for(const PendingReduction& reduction) const {
  const GradientBucket& plan = buckets_[reduction.bucket];
  if (reduction.memory == BucketContent::Memory::kResult) return reduction.content.parts[0].values;
  return plan.result->room(plan.dtype, is_busy(reduction.bucket));
}

Pending ReductionQueue::all_reduce(PendingReduction& reduction) const {
  const std::string& name = buckets_[reduction.bucket].name;
  reduction.reduced = reduction.content.parts[0].values;
  if (options_.backend_all_reduce) return backend_all_reduce(*mesh_.shard, encoded(reduction), name);
  return mesh_.shard->all_reduce(encoded(reduction), op(), name);
}

Pending ReductionQueue::reduce_to_owner(PendingReduction& reduction) {
  const GradientBucket& plan = buckets_[reduction.bucket];
  if (plan.reduces_apart) return reduce_apart(reduction);
  if (plan.owner == mesh_.shard->rank()) reduction.reduced = reduction.content.parts[0].values;
  if (!plan.codec->sum_dtype()) return exchange_encoded(reduction);
  return mesh_.shard->reduce(encoded(reduction), plan.owner, op(), plan.name);
}

// A reduce-scatter of which the owner gets all.
Pending ReductionQueue::reduce_apart(PendingReduction& reduction) {
  const GradientBucket& plan = buckets_[reduction.bucket];
  const at::Tensor& full = reduction.content.parts[0].values;
  std::vector<int64_t> counts(mesh_.shard->size(), 0);
  counts[plan.owner] = travelling(full).numel();
  at::Tensor received = full.narrow(0, 0, 0);
  if (plan.owner == mesh_.shard->rank()) received = reduction.reduced = room_for(reduction);
  return mesh_.shard->reduce_scatter(travelling(received), travelling(full), op(), std::move(counts), plan.name);
}

Pending ReductionQueue::reduce_scatter(PendingReduction& reduction) {
  const GradientBucket& plan = buckets_[reduction.bucket];
  reduction.reduced = room_for(reduction);
  if (options_.to_host != nullptr)
    reduction.staging = options_.staging->take(reduction.reduced.numel(), reduction.reduced.scalar_type());
  if (!plan.codec->sum_dtype()) return exchange_encoded(reduction);
  std::vector<at::Tensor> pieces{encoded(reduction)};
  for (size_t piece = 1; piece < plan.pieces.size(); ++piece)
    pieces.push_back(travelling(reduction.content.parts[piece].values));
  return reduce_scatter_pieces(*mesh_.shard, travelling(reduction.target()), std::move(pieces), op(), plan.name);
}

// An all-to-all in which each rank gets the encoded values of its part: its shard, or all if it is the owner.
Pending ReductionQueue::exchange_encoded(PendingReduction& reduction) {
  const GradientBucket& plan = buckets_[reduction.bucket];
  const int world = mesh_.shard->size(), rank = mesh_.shard->rank();
  const bool is_even = plan.layout.cut() == FlatLayout::Cut::kEvenly;
  const at::Tensor& full = reduction.content.parts[0].values;
  const int64_t part_numel = is_even ? plan.layout.shard_numel() : full.numel();
  const int64_t part_bytes = plan.codec->encoded_bytes(part_numel);
  std::vector<int64_t> send_counts(world, is_even ? part_bytes : 0), receive_counts(world, 0);
  send_counts[is_even ? rank : plan.owner] = part_bytes;
  if (is_even || plan.owner == rank) receive_counts.assign(world, part_bytes);
  reduction.wire = memory_.take(is_even ? world * part_bytes : part_bytes, at::kByte);
  for (int part = 0; part * part_bytes < reduction.wire.numel(); ++part)
    plan.codec->encode(full.narrow(0, part * part_numel, part_numel),
                       reduction.wire.narrow(0, part * part_bytes, part_bytes));
  reduction.received = memory_.take(receive_counts[rank] * world, at::kByte);
  return mesh_.shard->all_to_all(reduction.received, reduction.wire, std::move(receive_counts), std::move(send_counts),
                                 plan.name);
}

// ---- stages -------------------------------------------------------------------------------------

void ReductionQueue::push(Stage stage, PendingReduction reduction, size_t most_in_flight) {
  stages_[stage].push_back(std::move(reduction));
  while (stages_[stage].size() > most_in_flight) finish_oldest(stage);
}

ReductionQueue::PendingReduction ReductionQueue::pop(Stage stage) {
  PendingReduction reduction = std::move(stages_[stage].front());
  stages_[stage].pop_front();
  return reduction;
}

void ReductionQueue::finish_oldest(Stage stage) {
  PendingReduction reduction = pop(stage);
  if (stage == kToHost) {
    reduction.copy.wait_on_host();
    reduction.staging.reset();
    return accept_or_wait(std::move(reduction));
  }
  wait(reduction);
  reduction.content.require_as_borrowed(buckets_[reduction.bucket], parameters_, mesh_.world->rank());
  if (!reduction.reduced.defined()) return;
  if (stage == kAcrossCopies) return divide_and_move(std::move(reduction));
  decode(reduction);
  mesh_.replicas ? average_over_copies(std::move(reduction)) : divide_and_move(std::move(reduction));
}

void ReductionQueue::drain() {
  for (const Stage stage : {kReducing, kAcrossCopies, kToHost})
    while (!stages_[stage].empty()) finish_oldest(stage);
}

void ReductionQueue::discard() {
  for (const Stage stage : {kReducing, kAcrossCopies})
    while (!stages_[stage].empty()) {
      PendingReduction reduction = pop(stage);
      wait(reduction);
    }
  for (auto& stage : stages_) stage.clear();
}

void ReductionQueue::wait(PendingReduction& reduction) {
  reduction.pending.wait();
  memory_.count_borrowed(-reduction.content.borrowed_bytes());
  for (const auto& part : reduction.content.parts)  // whose stream need not be the current one
    if (part.memory == BucketContent::Memory::kBorrowed && !part.values.is_cpu())
      part.values.record_stream(current_stream(part.values.device()));
}

// Leaves the average, or the sum if there is a divisor, and frees everything else.
void ReductionQueue::decode(PendingReduction& reduction) const {
  const WireCodec& codec = *buckets_[reduction.bucket].codec;
  if (!codec.sum_dtype())
    add_encoded(reduction);
  else if (!codec.is_identity())
    codec.decode(reduction.wire, reduction.reduced);
  reduction.wire.reset();
  reduction.received.reset();
  reduction.content.parts.clear();
  if (options_.backend_all_reduce && !divisor_) reduction.reduced.div_(mesh_.world->size());
}

void ReductionQueue::add_encoded(PendingReduction& reduction) const {
  const WireCodec& codec = *buckets_[reduction.bucket].codec;
  const at::Tensor& result = reduction.target();
  const at::Tensor sum = result.scalar_type() == at::kFloat ? result : at::empty_like(result, at::kFloat);
  const int world = mesh_.shard->size();
  const int64_t part_bytes = reduction.received.numel() / world;
  codec.decode(reduction.received.narrow(0, 0, part_bytes), sum);
  for (int rank = 1; rank < world; ++rank) codec.add(reduction.received.narrow(0, rank * part_bytes, part_bytes), sum);
  if (!divisor_) sum.div_(world);
  if (!sum.is_same(result)) result.copy_(sum);
}

void ReductionQueue::average_over_copies(PendingReduction reduction) {
  reduction.pending = mesh_.replicas->all_reduce(travelling(reduction.target()), op(), buckets_[reduction.bucket].name);
  push(kAcrossCopies, std::move(reduction), options_.in_flight);
}

void ReductionQueue::divide_and_move(PendingReduction reduction) {
  if (divisor_) reduction.target().div_(*divisor_);
  if (!reduction.staging.defined()) return accept_or_wait(std::move(reduction));
  reduction.copy = options_.to_host->to_host(reduction.reduced, reduction.staging);
  push(kToHost, std::move(reduction), options_.in_flight);
}

// ---- results ------------------------------------------------------------------------------------

void ReductionQueue::accept_or_wait(PendingReduction reduction) {
  const std::vector<bool>& filled = reduction.content.filled;
  const bool is_filled = std::ranges::all_of(filled, [](bool member) { return member; });
  const bool must_follow = std::ranges::any_of(
      stages_[kWaiting], [&](const PendingReduction& other) { return other.bucket == reduction.bucket; });
  if (!is_filled || must_follow) return stages_[kWaiting].push_back(std::move(reduction));
  accept(reduction, filled);
}

void ReductionQueue::accept_waiting(const std::vector<bool>& used) {
  for (const PendingReduction& reduction : std::exchange(stages_[kWaiting], {})) {
    std::vector<bool> used_members;
    for (const size_t parameter : buckets_[reduction.bucket].members) used_members.push_back(used[parameter]);
    accept(reduction, used_members);
  }
}

void ReductionQueue::accept(const PendingReduction& reduction, const std::vector<bool>& used) const {
  GradientBuffer& result = *buckets_[reduction.bucket].result;
  reduction.memory == BucketContent::Memory::kAdopted ? result.adopt(reduction.reduced)
                                                      : result.accept(reduction.reduced, used);
  result.drop_if_unused();
  if (!observer_) return;
  if (const std::vector<at::Tensor> leaves = result.leaves(used); !leaves.empty()) observer_(leaves);
}

}  // namespace tessera
