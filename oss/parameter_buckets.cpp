#include "tessera/oss/parameter_buckets.h"

#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

namespace tessera {
namespace {

constexpr int64_t kAlignmentBytes = 64;   // what at::empty aligns to
constexpr int64_t kAloneBytes = 1 << 20;  // from here on a message's cost is its bytes

bool is_dense(const at::Tensor& tensor) { return tensor.is_non_overlapping_and_dense(); }

}  // namespace

ParameterBuckets::ParameterBuckets(std::vector<at::Tensor> parameters, std::vector<int> owners, int64_t bucket_bytes,
                                   std::optional<at::ScalarType> broadcast_dtype, Communicator& comm)
    : parameters_(std::move(parameters)),
      owners_(std::move(owners)),
      broadcast_dtype_(broadcast_dtype),
      comm_(comm),
      pool_(comm.device()) {
  at::NoGradGuard no_grad;
  if (comm_.size() == 1) return;  // nothing travels
  plan(bucket_bytes);
  for (Bucket& bucket : buckets_) {
    lay_out(bucket);
    if (bucket.flat.defined()) adopt(bucket);
  }
}

void ParameterBuckets::plan(int64_t bucket_bytes) {
  std::map<std::pair<at::ScalarType, bool>, Bucket> open;  // by dtype, and frozen apart from trainable
  std::map<std::pair<at::ScalarType, bool>, int64_t> open_bytes;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    const auto bytes = static_cast<int64_t>(parameter.nbytes());
    if (parameter.numel() == 0) continue;
    if (bytes >= kAloneBytes && is_dense(parameter)) {
      buckets_.push_back({{i}, {}, {}, {}});
      continue;
    }
    const auto kind = std::make_pair(parameter.scalar_type(), parameter.requires_grad());
    if (open_bytes[kind] + bytes > bucket_bytes && !open[kind].members.empty()) {
      buckets_.push_back(std::exchange(open[kind], {}));
      open_bytes[kind] = 0;
    }
    open[kind].members.push_back(i);
    open_bytes[kind] += bytes;
  }
  for (auto& [kind, bucket] : open)
    if (!bucket.members.empty()) buckets_.push_back(std::move(bucket));
}

void ParameterBuckets::lay_out(Bucket& bucket) {
  std::stable_sort(bucket.members.begin(), bucket.members.end(),
                   [&](size_t a, size_t b) { return owners_[a] < owners_[b]; });
  const auto element_bytes = static_cast<int64_t>(parameters_[bucket.members[0]].element_size());
  bucket.counts.assign(comm_.size(), 0);
  if (bucket.members.size() == 1 && is_dense(parameters_[bucket.members[0]])) {
    bucket.offsets = {0};
    bucket.counts[owners_[bucket.members[0]]] = parameters_[bucket.members[0]].numel();
    return;
  }
  int64_t end = 0;
  for (size_t index : bucket.members) {
    const int64_t numel = at::round_up(parameters_[index].numel(), kAlignmentBytes / element_bytes);
    bucket.offsets.push_back(end);
    bucket.counts[owners_[index]] += numel;
    end += numel;
  }
  bucket.flat = at::zeros({end}, parameters_[bucket.members[0]].options().requires_grad(false));
}

at::Tensor ParameterBuckets::place_of(const Bucket& bucket, size_t member) const {
  const at::Tensor& parameter = parameters_[bucket.members[member]];
  const at::Tensor room = bucket.flat.narrow(0, bucket.offsets[member], parameter.numel());
  return is_dense(parameter) ? room.as_strided(parameter.sizes(), parameter.strides()) : room.view(parameter.sizes());
}

void ParameterBuckets::adopt(Bucket& bucket) {
  for (size_t member = 0; member < bucket.members.size(); ++member) {
    at::Tensor parameter = parameters_[bucket.members[member]];
    at::Tensor place = place_of(bucket, member);
    place.copy_(parameter.detach());
    parameter.set_data(place);
  }
}

// Whether the parameters are still the bucket's views: module.to() or set_data() change that.
bool ParameterBuckets::is_adopted(const Bucket& bucket) const {
  for (size_t index : bucket.members)
    if (!parameters_[index].storage().is_alias_of(bucket.flat.storage())) return false;
  return true;
}

ParameterBuckets::Journey ParameterBuckets::start(Bucket& bucket) {
  at::Tensor flat = bucket.flat;
  if (flat.defined()) {
    if (!is_adopted(bucket)) adopt(bucket);
  } else {
    const at::Tensor parameter = parameters_[bucket.members[0]].detach();
    flat = parameter.as_strided({parameter.numel()}, {1});
  }
  Journey journey{&bucket, flat, {}};
  const int64_t begin = std::accumulate(bucket.counts.begin(), bucket.counts.begin() + comm_.rank(), int64_t{0});
  const int64_t own = bucket.counts[comm_.rank()];
  if (broadcast_dtype_ && *broadcast_dtype_ != flat.scalar_type() && at::isFloatingType(flat.scalar_type())) {
    journey.wire =
        pool_.take(flat.numel() * static_cast<int64_t>(c10::elementSize(*broadcast_dtype_))).view(*broadcast_dtype_);
    journey.wire.narrow(0, begin, own).copy_(flat.narrow(0, begin, own));
  }
  journey.pending =
      comm_.all_gather(journey.wire, journey.wire.narrow(0, begin, own), bucket.counts, "updated parameters");
  return journey;
}

void ParameterBuckets::finish(Journey& journey) {
  journey.pending.wait();
  const Bucket& bucket = *journey.bucket;
  const at::Tensor first = parameters_[bucket.members[0]].detach();
  if (journey.wire.scalar_type() != first.scalar_type()) {
    at::Tensor flat = bucket.flat.defined() ? bucket.flat : first.as_strided({first.numel()}, {1});
    int64_t offset = 0;
    for (int rank = 0; rank < comm_.size(); offset += bucket.counts[rank++])
      if (rank != comm_.rank())
        flat.narrow(0, offset, bucket.counts[rank]).copy_(journey.wire.narrow(0, offset, bucket.counts[rank]));
    pool_.give(journey.wire.view(at::kByte));
  }
  // The exchange wrote behind autograd's back: whoever saved the old values shall notice.
  for (size_t index : bucket.members)
    if (owners_[index] != comm_.rank()) parameters_[index].unsafeGetTensorImpl()->bump_version();
}

void ParameterBuckets::publish() {
  at::NoGradGuard no_grad;
  std::vector<Journey> journeys;
  for (Bucket& bucket : buckets_) {
    const bool any_trainable = std::any_of(bucket.members.begin(), bucket.members.end(),
                                           [&](size_t index) { return parameters_[index].requires_grad(); });
    if (any_trainable) journeys.push_back(start(bucket));
  }
  for (Journey& journey : journeys) finish(journey);
}

}  // namespace tessera
