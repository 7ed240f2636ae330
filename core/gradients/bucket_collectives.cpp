#include "core/gradients/bucket_collectives.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>

#include <utility>
#include <vector>

#include "core/comm/library_collectives.h"

namespace tessera::internal {

namespace {

// Returns a complex tensor as a flat tensor of real numbers, which collectives can send; other tensors unchanged.
at::Tensor travelling(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor).view({-1}) : tensor;
}

// Returns the first part in the dtype that the collective sums, encoded into `wire` unless the codec is the identity.
at::Tensor encoded(PendingReduction& reduction, const WireCodec& codec) {
  const at::Tensor& full = reduction.content.parts[0].values;
  if (codec.is_identity()) return travelling(full);
  reduction.wire = at::empty({codec.encoded_bytes(full.numel())}, full.options().dtype(at::kByte));
  codec.encode(full, reduction.wire);
  return reduction.wire.view(*codec.sum_dtype());
}

// Returns memory for the result: the first part's memory if it was allocated for the result, otherwise new memory.
at::Tensor room_for(const PendingReduction& reduction, const GradientBucket& plan) {
  const BucketContent::Part& first = reduction.content.parts[0];
  return first.memory == BucketContent::Memory::kResult ? first.values : plan.result->room(plan.dtype);
}

}  // namespace

void BucketCollectives::start(PendingReduction& reduction, const GradientBucket& plan) {
  switch (plan.layout.cut()) {
    case FlatLayout::Cut::kWhole:
      reduction.pending = all_reduce(reduction, plan);
      break;
    case FlatLayout::Cut::kByOwner:
      reduction.pending = reduce_to_owner(reduction, plan);
      break;
    case FlatLayout::Cut::kEvenly:
      reduction.pending = reduce_scatter(reduction, plan);
      break;
  }
}

Pending BucketCollectives::all_reduce(PendingReduction& reduction, const GradientBucket& plan) const {
  reduction.reduced = reduction.content.parts[0].values;
  const at::Tensor wire = encoded(reduction, *plan.route.codec);
  if (options_.backend_all_reduce) return backend_all_reduce(*mesh_.shard, wire, plan.name);
  return mesh_.shard->all_reduce(wire, op(), plan.name);
}

Pending BucketCollectives::reduce_to_owner(PendingReduction& reduction, const GradientBucket& plan) {
  if (plan.route.reduces_apart) return reduce_apart(reduction, plan);
  if (plan.owner == mesh_.shard->rank()) reduction.reduced = reduction.content.parts[0].values;
  if (!plan.route.codec->sum_dtype()) return exchange_encoded(reduction, plan);
  return mesh_.shard->reduce(encoded(reduction, *plan.route.codec), plan.owner, op(), plan.name);
}

// Reduces by a reduce-scatter in which only the owner's shard has elements. So the owner receives the sum in other
// memory than the gradients that it sends, which are in autograd's memory.
Pending BucketCollectives::reduce_apart(PendingReduction& reduction, const GradientBucket& plan) const {
  const at::Tensor& full = reduction.content.parts[0].values;
  std::vector<int64_t> counts(mesh_.shard->size(), 0);
  counts[plan.owner] = travelling(full).numel();
  at::Tensor received = full.narrow(0, 0, 0);
  if (plan.owner == mesh_.shard->rank()) received = reduction.reduced = room_for(reduction, plan);
  return mesh_.shard->reduce_scatter(travelling(received), travelling(full), op(), std::move(counts), plan.name);
}

Pending BucketCollectives::reduce_scatter(PendingReduction& reduction, const GradientBucket& plan) {
  reduction.reduced = room_for(reduction, plan);
  if (plan.is_offloaded)
    reduction.staging = options_.staging->take(reduction.reduced.numel(), reduction.reduced.scalar_type());
  if (!plan.route.codec->sum_dtype()) return exchange_encoded(reduction, plan);
  std::vector<at::Tensor> pieces{encoded(reduction, *plan.route.codec)};
  for (size_t piece = 1; piece < plan.route.pieces.size(); ++piece)
    pieces.push_back(travelling(reduction.content.parts[piece].values));
  return reduce_scatter_pieces(*mesh_.shard, travelling(reduction.target()), std::move(pieces), op(), plan.name);
}

// Sends encoded values by an all-to-all: to each rank the values of its shard, or to the bucket's owner all values.
Pending BucketCollectives::exchange_encoded(PendingReduction& reduction, const GradientBucket& plan) {
  const int world = mesh_.shard->size(), rank = mesh_.shard->rank();
  const bool is_even = plan.layout.cut() == FlatLayout::Cut::kEvenly;
  const at::Tensor& full = reduction.content.parts[0].values;
  const int64_t part_numel = is_even ? plan.layout.shard_numel() : full.numel();
  const int64_t part_bytes = plan.route.codec->encoded_bytes(part_numel);
  std::vector<int64_t> send_counts(world, is_even ? part_bytes : 0), receive_counts(world, 0);
  send_counts[is_even ? rank : plan.owner] = part_bytes;
  if (is_even || plan.owner == rank) receive_counts.assign(world, part_bytes);
  reduction.wire = memory_.take(is_even ? world * part_bytes : part_bytes, at::kByte);
  for (int part = 0; part * part_bytes < reduction.wire.numel(); ++part)
    plan.route.codec->encode(full.narrow(0, part * part_numel, part_numel),
                             reduction.wire.narrow(0, part * part_bytes, part_bytes));
  reduction.received = memory_.take(receive_counts[rank] * world, at::kByte);
  return mesh_.shard->all_to_all(reduction.received, reduction.wire, std::move(receive_counts), std::move(send_counts),
                                 plan.name);
}

void BucketCollectives::decode(PendingReduction& reduction, const GradientBucket& plan) const {
  if (!plan.route.codec->sum_dtype())
    add_encoded(reduction, *plan.route.codec);
  else if (!plan.route.codec->is_identity())
    plan.route.codec->decode(reduction.wire, reduction.reduced);
  reduction.wire.reset();
  reduction.received.reset();
  reduction.content.parts.clear();
  if (options_.backend_all_reduce && !divisor_) reduction.reduced.div_(mesh_.world->size());
}

void BucketCollectives::add_encoded(PendingReduction& reduction, const WireCodec& codec) const {
  const at::Tensor& result = reduction.target();
  const at::Tensor sum = result.scalar_type() == at::kFloat ? result : at::empty_like(result, at::kFloat);
  const int world = mesh_.shard->size();
  const int64_t part_bytes = reduction.received.numel() / world;
  codec.decode(reduction.received.narrow(0, 0, part_bytes), sum);
  for (int rank = 1; rank < world; ++rank) codec.add(reduction.received.narrow(0, rank * part_bytes, part_bytes), sum);
  if (!divisor_) sum.div_(world);
  if (!sum.is_same(result)) result.copy_(sum);
}

void BucketCollectives::start_over_copies(PendingReduction& reduction, const GradientBucket& plan) const {
  reduction.pending = mesh_.replicas->all_reduce(travelling(reduction.target()), op(), plan.name);
}

}  // namespace tessera::internal
