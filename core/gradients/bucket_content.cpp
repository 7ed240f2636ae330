#include "core/gradients/bucket_content.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_zero.h>

#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "core/memory/without_data.h"

namespace tessera::internal {

namespace {

constexpr size_t kSmallGradientBytes = size_t{256} << 10;

[[noreturn]] void throw_changed(const GradientBucket& bucket, size_t member,
                                const std::vector<PlannedParameter>& parameters, int rank) {
  throw std::logic_error("the gradient of parameter '" + parameters[bucket.members[member]].fqn + "' on rank " +
                         std::to_string(rank) +
                         " was changed in place after it had been handed over: a hook that changes a gradient has to "
                         "return another tensor");
}

}  // namespace

BucketContent BucketContent::of(const GradientBucket& bucket) {
  BucketContent content;
  content.filled.assign(bucket.members.size(), false);
  return content;
}

void BucketContent::borrow(size_t piece, const at::Tensor& values) {
  uses.begin(values.device());
  parts[piece] = {values, Memory::kBorrowed, values._version()};
}

int64_t BucketContent::borrowed_bytes() const {
  int64_t bytes = 0;
  for (const Part& part : parts)
    if (part.memory == Memory::kBorrowed) bytes += static_cast<int64_t>(part.values.nbytes());
  return bytes;
}

void BucketContent::require_as_borrowed(const GradientBucket& bucket, const std::vector<PlannedParameter>& parameters,
                                        int rank) const {
  for (size_t piece = 0; piece < parts.size(); ++piece)
    if (parts[piece].memory == Memory::kBorrowed && parts[piece].values._version() != parts[piece].version)
      throw_changed(bucket, *bucket.route.pieces[piece].member, parameters, rank);
}

bool BucketContent::may_wait(const at::Tensor& gradient) {
  return !gradient.is_cpu() && gradient.layout() == at::kStrided && !gradient.is_inference() &&
         gradient.nbytes() <= kSmallGradientBytes;
}

void BucketContent::wait_for_more(size_t member, const at::Tensor& gradient) {
  uses.use();
  waiting.push_back({member, gradient, gradient._version(), current_stream(gradient.device())});
}

void BucketContent::put(const GradientBucket& bucket, size_t member, const at::Tensor& gradient, bool is_first) {
  is_first ? uses.use() : uses.join();
  if (is_first && copy_bytes(bucket, member, gradient)) return;
  const at::Tensor place = view_of_place(bucket, member);
  is_first ? place.copy_(gradient) : place.add_(gradient);
}

// Copies a small gradient on the CPU as bytes, because an operator's dispatch takes longer than the copy. Returns false
// if an operator must copy: a large gradient, on several threads, or a gradient of another layout, dtype or dispatch
// key. A gradient with another key may be a parameter of FSDP, whose memory exists only while operators use it.
bool BucketContent::copy_bytes(const GradientBucket& bucket, size_t member, const at::Tensor& gradient) {
  const at::Tensor& values = parts[bucket.route.piece_of[member]].values;
  const ParameterGeometry& geometry = bucket.geometries[member];
  if (!gradient.is_cpu() || gradient.layout() != at::kStrided || gradient.numel() == 0 ||
      gradient.nbytes() > kSmallGradientBytes || gradient.scalar_type() != bucket.dtype ||
      gradient.sizes() != at::IntArrayRef(geometry.sizes) || gradient.strides() != at::IntArrayRef(geometry.strides) ||
      !values.key_set().isSupersetOf(gradient.key_set()))
    return false;
  if (is_without_data()) return true;
  auto* const begin = static_cast<std::byte*>(values.mutable_data_ptr());
  std::memcpy(begin + offset_of_place(bucket, member) * values.element_size(), gradient.const_data_ptr(),
              gradient.nbytes());
  return true;
}

int64_t BucketContent::offset_of_place(const GradientBucket& bucket, size_t member) {
  return bucket.layout.offset(static_cast<int64_t>(member)) -
         bucket.route.pieces[bucket.route.piece_of[member]].range.begin;
}

at::Tensor BucketContent::view_of_place(const GradientBucket& bucket, size_t member) const {
  return detached_view_in(parts[bucket.route.piece_of[member]].values, bucket.geometries[member],
                          offset_of_place(bucket, member));
}

void BucketContent::copy_waiting(const GradientBucket& bucket, const std::vector<PlannedParameter>& parameters,
                                 int rank) {
  if (waiting.empty()) return;
  uses.join();
  const c10::Stream here = current_stream(waiting[0].gradient.device());
  std::vector<at::Tensor> places, gradients;
  for (const Waiting& each : std::exchange(waiting, {})) {
    if (each.gradient._version() != each.version) throw_changed(bucket, each.member, parameters, rank);
    if (each.stream != here) each.gradient.record_stream(here);
    places.push_back(view_of_place(bucket, each.member));
    gradients.push_back(each.gradient);
  }
  at::_foreach_copy_(places, gradients);
}

void BucketContent::fill_gaps(const GradientBucket& bucket, bool between_members) const {
  const FlatLayout& layout = bucket.layout;
  std::vector<at::Tensor> gaps;
  auto add_gap = [&](int64_t from, int64_t to) {
    for (size_t piece = 0; piece < parts.size() && from < to; ++piece) {
      const Range& range = bucket.route.pieces[piece].range;
      const int64_t end = std::min(to, range.end);
      if (from >= end) continue;
      gaps.push_back(parts[piece].values.narrow(0, from - range.begin, end - from));
      from = end;
    }
  };
  int64_t end = 0;
  for (size_t member = 0; member < bucket.members.size(); ++member) {
    const int64_t begin = layout.offset(static_cast<int64_t>(member));
    const int64_t end_of_member = begin + layout.numel(static_cast<int64_t>(member));
    if (!between_members && !filled[member]) add_gap(begin, end_of_member);
    if (!between_members || !filled[member]) continue;  // the gap before the next filled member includes this member
    add_gap(end, begin);
    end = end_of_member;
  }
  if (between_members) add_gap(end, layout.full_numel());
  if (parts[0].values.is_cpu()) {
    for (at::Tensor& gap : gaps) gap.zero_();
  } else if (!gaps.empty()) {
    at::_foreach_zero_(gaps);  // one kernel launch for all gaps
  }
}

bool BucketContent::forget(const GradientBucket& bucket, size_t member) {
  filled[member] = false;
  if (Part& part = parts[bucket.route.piece_of[member]]; part.memory == Memory::kBorrowed) part = {};
  std::erase_if(waiting, [&](const Waiting& each) { return each.member == member; });
  return std::ranges::none_of(filled, [](bool is_filled) { return is_filled; });
}

}  // namespace tessera::internal
