#include "core/gradients/gradient_reducer.h"

#include <algorithm>
#include <utility>

#include "core/runtime/lazy_values.h"

namespace tessera::internal {
namespace {

// Whether the caller holds the only reference to a gradient and to its memory. The gradient may be a view: a linear
// layer's weight gradient is a transposed product. The base of a view must have no other reference either.
bool is_held_once(const at::Tensor& gradient) {
  const bool has_base = gradient.is_view() && gradient._base().use_count() == 1;
  return gradient.use_count() == 1 && gradient.storage().use_count() == (has_base ? 2 : 1);
}

// Whether a gradient can be sent from its own memory. A gradient with other references must be copied, as autograd
// does: a hook that holds a reference may write through data(), which does not change the version.
bool can_borrow_in_place(const GradientBucket& plan, size_t member, const at::Tensor& gradient) {
  if (plan.route.pieces[plan.route.piece_of[member]].member != member || gradient.scalar_type() != plan.dtype ||
      gradient.layout() != at::kStrided || gradient.is_inference() || !is_held_once(gradient) ||
      gradient.strides() != at::IntArrayRef(plan.geometries[member].strides))
    return false;
  // An adopted gradient becomes `.grad`, which must not keep the rest of a larger storage alive.
  return !plan.route.adopts || gradient.storage().nbytes() == gradient.nbytes();
}

}  // namespace

GradientCollector::GradientCollector(const std::vector<PlannedParameter>& parameters,
                                     const std::vector<GradientBucket>& buckets, BucketMemory& memory, Options options)
    : parameters_(parameters),
      buckets_(buckets),
      memory_(memory),
      options_(options),
      places_(parameters.size()),
      used_(parameters.size(), false) {}

void GradientCollector::rebuild() {
  places_.assign(parameters_.size(), {});
  used_.assign(parameters_.size(), false);
  slots_.assign(buckets_.size(), {});
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    slots_[bucket].content = slots_[bucket].recomputed = BucketContent::of(buckets_[bucket]);
    const auto& members = buckets_[bucket].members;
    for (size_t member = 0; member < members.size(); ++member) places_[members[member]] = {bucket, member};
  }
}

// ---- a pass -------------------------------------------------------------------------------------

void GradientCollector::begin_pass() {
  arrivals_.clear();
  for (size_t i = 0; i < places_.size(); ++i) {
    places_[i].has_arrived = false;
    used_[i] = keeps(i);
  }
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    const auto& members = buckets_[bucket].members;
    slots_[bucket].expected = slots_[bucket].missing =
        std::ranges::count_if(members, [&](size_t parameter) { return parameters_[parameter].tensor.requires_grad(); });
  }
}

void GradientCollector::note_arrival(size_t parameter) {
  if (std::exchange(places_[parameter].has_arrived, true)) return;  // a second gradient, from a recomputed part
  arrivals_.push_back(parameter);
  if (size_t& missing = slots_[places_[parameter].bucket].missing; missing > 0) --missing;
}

PassUse GradientCollector::use() const {
  PassUse use{used_, {}};
  for (const Slot& slot : slots_) use.recomputed.push_back(slot.recomputed.is_begun());
  return use;
}

// ---- gradients ----------------------------------------------------------------------------------

void GradientCollector::place(size_t parameter, const at::Tensor& gradient, bool is_recomputed) {
  used_[parameter] = true;
  const Place& place = places_[parameter];
  Slot& slot = slots_[place.bucket];
  BucketContent& content = is_recomputed ? slot.recomputed : slot.content;
  // A dense gradient must not get another reference here, because can_borrow_in_place() counts references.
  if (gradient.is_sparse())
    collect(content, place.bucket, place.member, gradient.to_dense());
  else if (has_lazy_values(gradient))
    collect(content, place.bucket, place.member, gradient.clone());
  else
    collect(content, place.bucket, place.member, gradient);
}

void GradientCollector::collect(BucketContent& content, size_t bucket, size_t member, const at::Tensor& gradient) {
  const GradientBucket& plan = buckets_[bucket];
  const size_t piece = plan.route.piece_of[member];
  const bool is_first = !content.filled[member];
  content.filled[member] = true;
  content.parts.resize(plan.route.pieces.size());
  if (!content.parts[piece].values.defined()) {
    if (can_borrow_in_place(plan, member, gradient)) {
      content.borrow(piece, gradient.as_strided({gradient.numel()}, {1}, gradient.storage_offset()));
      return memory_.count_borrowed(static_cast<int64_t>(gradient.nbytes()));
    }
    make_room(content, bucket, piece);
  }
  copy_borrowed(content, bucket, piece);
  if (is_first && BucketContent::may_wait(gradient)) return content.wait_for_more(member, gradient);
  if (!is_first) copy_waiting(content, bucket);
  content.put(plan, member, gradient, is_first);
}

// Allocates a piece. Uses the result's memory if this rank receives the whole bucket and the result has no gradient.
void GradientCollector::make_room(BucketContent& content, size_t bucket, size_t piece) {
  const GradientBucket& plan = buckets_[bucket];
  const int64_t numel = plan.route.pieces[piece].range.numel();
  const bool fills_result = plan.route.pieces.size() == 1 && plan.result != nullptr && options_.may_fill_result &&
                            plan.result->numel() == numel && plan.result->dtype() == plan.dtype &&
                            plan.result->is_free();
  BucketContent::Part& part = content.parts[piece];
  part.memory = fills_result ? BucketContent::Memory::kResult : BucketContent::Memory::kBucket;
  part.values = fills_result ? plan.result->room(plan.dtype) : memory_.take(numel, plan.dtype);
  content.uses.begin(part.values.device());
}

void GradientCollector::copy_borrowed(BucketContent& content, size_t bucket, size_t piece) {
  if (content.parts[piece].memory != BucketContent::Memory::kBorrowed) return;
  content.require_as_borrowed(buckets_[bucket], parameters_, options_.rank);
  const at::Tensor borrowed = std::exchange(content.parts[piece], {}).values;
  memory_.count_borrowed(-static_cast<int64_t>(borrowed.nbytes()));
  content.uses.join();
  make_room(content, bucket, piece);
  content.parts[piece].values.copy_(borrowed);
}

void GradientCollector::copy_waiting(BucketContent& content, size_t bucket) const {
  content.copy_waiting(buckets_[bucket], parameters_, options_.rank);
}

// ---- contents of buckets -------------------------------------------------------------------------

BucketContent GradientCollector::take(size_t bucket) {
  return sealed(std::exchange(slots_[bucket].content, BucketContent::of(buckets_[bucket])), bucket);
}

BucketContent GradientCollector::take_recomputed(size_t bucket) {
  return sealed(std::exchange(slots_[bucket].recomputed, BucketContent::of(buckets_[bucket])), bucket);
}

BucketContent GradientCollector::sealed(BucketContent content, size_t bucket) {
  const GradientBucket& plan = buckets_[bucket];
  content.parts.resize(plan.route.pieces.size());
  for (size_t piece = 0; piece < plan.route.pieces.size(); ++piece)
    if (!content.parts[piece].values.defined()) make_room(content, bucket, piece);
  copy_waiting(content, bucket);
  content.uses.join();
  // Padding must be zero in encoded blocks, where it affects the scale, and in shards, which contain it.
  content.fill_gaps(plan, plan.layout.cut() == FlatLayout::Cut::kEvenly || !plan.route.codec->sum_dtype());
  if (plan.route.adopts) adopt(content, bucket);
  return content;
}

// Makes a borrowed gradient the bucket's own memory. The reduction writes to this memory, which becomes `.grad`.
void GradientCollector::adopt(BucketContent& content, size_t bucket) {
  BucketContent::Part& part = content.parts[0];
  if (part.memory != BucketContent::Memory::kBorrowed) return;
  content.require_as_borrowed(buckets_[bucket], parameters_, options_.rank);
  memory_.count_borrowed(-static_cast<int64_t>(part.values.nbytes()));
  part.memory = BucketContent::Memory::kBucket;
}

void GradientCollector::keep_for_next_pass() {
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    BucketContent& content = slots_[bucket].content;
    copy_waiting(content, bucket);
    for (size_t piece = 0; piece < content.parts.size(); ++piece) copy_borrowed(content, bucket, piece);
  }
}

bool GradientCollector::keeps(size_t parameter) const {
  const Place& place = places_[parameter];
  return place.bucket != kNowhere && slots_[place.bucket].content.filled[place.member];
}

void GradientCollector::forget(size_t parameter) {
  if (!keeps(parameter)) return;
  const Place& place = places_[parameter];
  BucketContent& content = slots_[place.bucket].content;
  used_[parameter] = false;
  memory_.count_borrowed(-content.borrowed_bytes());
  if (content.forget(buckets_[place.bucket], place.member)) content = BucketContent::of(buckets_[place.bucket]);
  memory_.count_borrowed(content.borrowed_bytes());
}

void GradientCollector::forget_recomputed() {
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket)
    slots_[bucket].recomputed = BucketContent::of(buckets_[bucket]);
}

void GradientCollector::forget_all() {
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket)
    slots_[bucket].content = slots_[bucket].recomputed = BucketContent::of(buckets_[bucket]);
  memory_.forget_borrowed();
  used_.assign(used_.size(), false);
}

}  // namespace tessera::internal
