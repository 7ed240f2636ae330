#include "oss/parameter_buckets.h"

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/layout/bucket_plan.h"
#include "core/memory/memory_kind_scope.h"
#include "core/runtime/lazy_values.h"

namespace tessera::internal {

ParameterBuckets::ParameterBuckets(std::vector<at::Tensor> parameters, std::vector<int> owners, int64_t bucket_bytes,
                                   std::optional<at::ScalarType> broadcast_dtype, Communicator& comm)
    : parameters_(std::move(parameters)),
      owners_(std::move(owners)),
      broadcast_dtype_(broadcast_dtype),
      comm_(comm),
      buffers_(comm.device(), MemoryKind::kStaging) {
  at::NoGradGuard no_grad;
  if (comm_.size() == 1) return;  // nothing to publish
  plan(bucket_bytes);
  for (Bucket& bucket : buckets_)
    if (bucket.flat.defined()) adopt(bucket);
}

// Groups parameters into buckets. Parameters that are not stepped get separate buckets, because they are not published.
void ParameterBuckets::plan(int64_t bucket_bytes) {
  std::vector<BucketItem> items;
  std::vector<size_t> order;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    items.push_back({parameter.numel(), parameter.scalar_type(), is_stepped(parameter) ? 1 : 0,
                     parameter.is_non_overlapping_and_dense()});
    if (parameter.numel() > 0) order.push_back(i);
  }
  for (auto& members : plan_buckets(items, order, {.bucket_bytes = bucket_bytes}))
    buckets_.push_back(make_bucket(std::move(members)));
  for (Bucket& bucket : buckets_)
    bucket.has_trained =
        std::ranges::any_of(bucket.members, [&](size_t index) { return is_stepped(parameters_[index]); });
}

ParameterBuckets::Bucket ParameterBuckets::make_bucket(std::vector<size_t> members) const {
  std::ranges::stable_sort(members, [&](size_t a, size_t b) { return owners_[a] < owners_[b]; });
  const at::Tensor& first = parameters_[members[0]];
  std::string name =
      "updated parameters, " + std::to_string(members.size()) + " from number " + std::to_string(members[0]);
  std::vector<int64_t> numels;
  std::vector<int> owners;
  std::vector<ParameterGeometry> geometries;
  std::vector<TensorSignature> kinds;
  for (size_t member : members) {
    numels.push_back(parameters_[member].numel());
    owners.push_back(owners_[member]);
    geometries.push_back(geometry_of(parameters_[member]));
    kinds.push_back(TensorSignature::of(parameters_[member]));
  }
  Bucket bucket{std::move(name), std::move(members), std::move(geometries),
                FlatLayout::by_owner(std::move(numels), owners, comm_.size(),
                                     FlatLayout::alignment_numel(static_cast<int64_t>(first.element_size()))),
                std::move(kinds)};
  if (bucket.members.size() > 1 || !first.is_non_overlapping_and_dense() || has_lazy_values(first)) {
    const MemoryKindScope kind(MemoryKind::kParameters);
    bucket.flat = at::zeros({bucket.layout.full_numel()}, first.options().requires_grad(false));
  }
  return bucket;
}

bool ParameterBuckets::is_in_place(const Bucket& bucket, size_t member) const {
  const at::Tensor& parameter = parameters_[bucket.members[member]];
  return parameter.storage().is_alias_of(bucket.flat.storage()) &&
         is_view_at(parameter, bucket.geometries[member], bucket.layout.offset(static_cast<int64_t>(member)));
}

// Returns whether the member shares its memory with tensors that are not parameters of this object.
bool ParameterBuckets::is_shared(const Bucket& bucket, size_t member) const {
  const c10::Storage& storage = parameters_[bucket.members[member]].storage();
  if (storage.use_count() == 1) return false;
  const auto own = std::ranges::count_if(
      parameters_, [&](const at::Tensor& parameter) { return parameter.storage().is_alias_of(storage); });
  return storage.use_count() > static_cast<size_t>(own);
}

void ParameterBuckets::adopt(Bucket& bucket) {
  bucket.stays.resize(bucket.members.size(), false);
  for (size_t member = 0; member < bucket.members.size(); ++member) {
    if (is_in_place(bucket, member) || bucket.stays[member]) continue;
    if (is_shared(bucket, member)) {
      bucket.stays[member] = true;
      continue;
    }
    const at::Tensor& parameter = parameters_[bucket.members[member]];
    const at::Tensor view = view_of(bucket, member);
    view.copy_(parameter.detach());
    parameter.set_data(view);
  }
}

// Moves parameters back after torch::load(), module.to() or set_data() gave them other memory. If other tensors use the
// bucket's memory (a kept view, a swapped parameter), gives the bucket new memory, and members keep their own.
void ParameterBuckets::adopt_again(Bucket& bucket) {
  size_t in_flat = 0;
  bool has_moved = false, have_swapped = false;
  for (size_t member = 0; member < bucket.members.size(); ++member) {
    const bool is_in_flat = parameters_[bucket.members[member]].storage().is_alias_of(bucket.flat.storage());
    if (is_in_flat) ++in_flat;
    if (bucket.stays[member] || is_in_place(bucket, member)) continue;
    has_moved = true;
    have_swapped = have_swapped || is_in_flat;
  }
  if (!has_moved) return;
  if (have_swapped || bucket.flat.storage().use_count() > in_flat + 1) {
    bucket.flat = at::zeros_like(bucket.flat);
    bucket.stays.assign(bucket.members.size(), true);
  } else {
    adopt(bucket);
  }
}

bool ParameterBuckets::trains(const Bucket& bucket) const {
  return bucket.has_trained ||
         std::ranges::any_of(bucket.members, [&](size_t index) { return parameters_[index].requires_grad(); });
}

void ParameterBuckets::note_trained() {
  for (Bucket& bucket : buckets_) bucket.has_trained = trains(bucket);
}

// Returns whether publishing rounds the values of a parameter of `dtype`.
bool ParameterBuckets::is_rounded(at::ScalarType dtype) const {
  return broadcast_dtype_ && *broadcast_dtype_ != dtype && at::isFloatingType(dtype);
}

at::Tensor ParameterBuckets::as_received(const at::Tensor& parameter, const at::Tensor& values) const {
  if (!is_rounded(parameter.scalar_type())) return values;
  for (const Bucket& bucket : buckets_)
    for (const size_t index : bucket.members)
      if (parameters_[index].is_same(parameter) && owners_[index] != comm_.rank() && trains(bucket))
        return values.to(parameter.scalar_type()).to(*broadcast_dtype_);
  return values;
}

void ParameterBuckets::require_unconverted() const {
  for (const Bucket& bucket : buckets_) {
    if (!bucket.has_trained) continue;
    for (size_t member = 0; member < bucket.members.size(); ++member) {
      const at::Tensor& parameter = parameters_[bucket.members[member]];
      if (bucket.kinds[member].is_of(parameter)) continue;
      throw std::logic_error("OSS: parameter number " + std::to_string(bucket.members[member]) + " " +
                             bucket.kinds[member].change_of(parameter) +
                             " when the optimizer was built: convert a module before that");
    }
  }
}

void ParameterBuckets::reattach() {
  at::NoGradGuard no_grad;
  note_trained();
  for (Bucket& bucket : buckets_)
    if (bucket.flat.defined() && bucket.has_trained) adopt_again(bucket);
}

ParameterBuckets::PendingGather ParameterBuckets::start(Bucket& bucket) {
  if (bucket.flat.defined()) adopt_again(bucket);
  PendingGather gather{&bucket, bucket.flat, {}, {}};
  if (gather.values.defined()) {
    for (size_t member = 0; member < bucket.members.size(); ++member)
      if (const size_t index = bucket.members[member]; bucket.stays[member] && owners_[index] == comm_.rank())
        view_of(bucket, member).copy_(parameters_[index].detach());
  } else {
    const at::Tensor parameter = parameters_[bucket.members[0]].detach();
    gather.values = parameter.as_strided({parameter.numel()}, {1}, parameter.storage_offset());
  }
  gather.wire = gather.values;
  const Range own = bucket.layout.shard(comm_.rank());
  if (is_rounded(gather.values.scalar_type())) {
    gather.wire = buffers_.take(gather.values.numel(), *broadcast_dtype_);
    gather.wire.narrow(0, own.begin, own.numel()).copy_(gather.values.narrow(0, own.begin, own.numel()));
  }
  gather.pending =
      comm_.all_gather(gather.wire, gather.wire.narrow(0, own.begin, own.numel()), bucket.layout.counts(), bucket.name);
  return gather;
}

void ParameterBuckets::finish(PendingGather& gather) {
  gather.pending.wait();
  const Bucket& bucket = *gather.bucket;
  if (!gather.wire.is_same(gather.values)) {
    for (int rank = 0; rank < comm_.size(); ++rank) {
      const Range part = bucket.layout.shard(rank);
      if (rank != comm_.rank())
        gather.values.narrow(0, part.begin, part.numel()).copy_(gather.wire.narrow(0, part.begin, part.numel()));
    }
  }
  for (size_t member = 0; member < bucket.stays.size(); ++member)
    if (const size_t index = bucket.members[member]; bucket.stays[member] && owners_[index] != comm_.rank())
      parameters_[index].data().copy_(view_of(bucket, member));
  // Raises versions, because autograd did not record these writes and must refuse graphs that saved the old values.
  for (size_t index : bucket.members)
    if (owners_[index] != comm_.rank()) parameters_[index].unsafeGetTensorImpl()->bump_version();
}

std::vector<ParameterBuckets::PendingGather> ParameterBuckets::publish(CollectiveLog& log,
                                                                       const StepOwned& step_owned) {
  at::NoGradGuard no_grad;
  std::vector<PendingGather> gathers;
  note_trained();
  size_t next = 0;
  auto start_up_to = [&](size_t end) {
    for (; next < end; ++next) {
      if (!buckets_[next].has_trained) continue;
      log.add("all-gather", buckets_[next].name, buckets_[next].layout.full_numel());
      gathers.push_back(start(buckets_[next]));
    }
  };
  if (step_owned) {
    // In each turn, steps enough buckets to make the optimizer's operator calls efficient, then starts to publish them.
    const int64_t turn_bytes = least_step_bytes * (comm_.device().is_cpu() ? 1 : kDeviceStepFactor);
    std::vector<at::Tensor> turn = owned_outside_buckets();
    int64_t bytes = 0;
    for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
      bytes += add_owned(buckets_[bucket], turn);
      if (bytes < turn_bytes) continue;
      step_owned(std::exchange(turn, {}));
      bytes = 0;
      start_up_to(bucket + 1);
    }
    if (!turn.empty()) step_owned(turn);
  }
  start_up_to(buckets_.size());
  return gathers;
}

// Returns this rank's parameters without elements. They are not published, but their optimizer states count steps.
std::vector<at::Tensor> ParameterBuckets::owned_outside_buckets() const {
  std::vector<at::Tensor> owned;
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (parameters_[i].numel() == 0 && owners_[i] == comm_.rank()) owned.push_back(parameters_[i]);
  return owned;
}

// Adds this rank's parameters of the bucket to `to`. Returns the bytes of the added parameters.
int64_t ParameterBuckets::add_owned(const Bucket& bucket, std::vector<at::Tensor>& to) const {
  int64_t bytes = 0;
  for (const size_t index : bucket.members) {
    if (owners_[index] != comm_.rank()) continue;
    to.push_back(parameters_[index]);
    bytes += static_cast<int64_t>(parameters_[index].nbytes());
  }
  return bytes;
}

void ParameterBuckets::finish(std::vector<PendingGather>& gathers) {
  at::NoGradGuard no_grad;
  for (PendingGather& gather : gathers) finish(gather);
}

}  // namespace tessera::internal
