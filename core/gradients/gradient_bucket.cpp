#include "core/gradients/gradient_bucket.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "core/comm/library_collectives.h"
#include "core/gradients/gradient_part.h"
#include "core/layout/tensor_signature.h"
#include "core/paging/residency.h"
#include "core/runtime/lazy_values.h"

namespace tessera::internal {
namespace {

// Adds `values` to `grad`. Makes `grad` dense first: a gradient from before wrapping may be sparse.
void add_to(at::Tensor& grad, const at::Tensor& values) {
  if (grad.is_sparse()) grad = grad.to_dense();
  grad.add_(values);
}

std::vector<size_t> pieces_of_members(const GradientBucket& bucket, const std::vector<BucketPiece>& pieces) {
  std::vector<size_t> piece_of;
  size_t piece = 0;
  for (size_t member = 0; member < bucket.members.size(); ++member) {
    const int64_t begin = bucket.layout.offset(static_cast<int64_t>(member));
    while (piece + 1 < pieces.size() && begin >= pieces[piece].range.end) ++piece;
    piece_of.push_back(piece);
  }
  return piece_of;
}

}  // namespace

GradientBuffer::GradientBuffer(std::vector<Member> members, int64_t numel, at::ScalarType dtype, Memory memory,
                               bool as_views)
    : members_(std::move(members)), numel_(numel), dtype_(dtype), memory_(std::move(memory)), as_views_(as_views) {}

bool GradientBuffer::is_free() const {
  return std::ranges::none_of(members_, [](const Member& member) { return member.leaf.grad().defined(); });
}

at::Tensor GradientBuffer::as_gradient(const at::Tensor& values, size_t member) const {
  const std::string& label = members_[member].part_label;
  return label.empty() ? values : as_part_of_gradient(values, label);
}

void GradientBuffer::accept(const at::Tensor& values, const std::vector<bool>& used) {
  if (values.scalar_type() != dtype_) return accept(room(dtype_).copy_(values), used);
  const bool becomes_gradient = is_free() && (as_views_ || members_.size() == 1);
  if (becomes_gradient) {
    shared_ = values.storage().getWeakStorageImpl();
  } else if (const at::Tensor whole = whole_gradient();
             whole.defined() && std::ranges::all_of(used, [](bool is_used) { return is_used; })) {
    whole.add_(values);
    for (const Member& member : members_) forget_norm(member.leaf.grad());
    return;
  }
  for (size_t i = 0; i < members_.size(); ++i) {
    if (!used[i]) continue;
    at::Tensor& grad = members_[i].leaf.mutable_grad();
    if (grad.defined()) {
      add_to(grad, part_of(values, i));
      if (!is_part_of_gradient(grad)) grad = as_gradient(grad, i);  // the user assigned this gradient
      forget_norm(grad);
    } else {
      const at::Tensor part = part_of(values, i);
      grad = as_gradient(becomes_gradient ? part : part.clone(), i);
    }
  }
}

at::Tensor GradientBuffer::whole_gradient() const {
  for (const Member& member : members_) {
    const at::Tensor& grad = member.leaf.grad();
    if (!is_shared(grad) || has_lazy_values(grad) || !is_view_at(grad, member.geometry, member.offset)) return {};
  }
  const auto storage = shared_.lock();
  if (!storage) return {};
  const auto options = at::TensorOptions().dtype(dtype_).device(storage->device());
  return at::empty({0}, options).set_(c10::Storage(storage), 0, {numel_}, {1});
}

int64_t GradientBuffer::bytes() const {
  const auto storage = shared_.lock();
  int64_t bytes = storage ? static_cast<int64_t>(storage->nbytes()) : 0;
  for (const Member& member : members_) {
    const at::Tensor& grad = member.leaf.grad();
    if (grad.defined() && !is_shared(grad) && !is_paged(grad)) bytes += static_cast<int64_t>(grad.nbytes());
  }
  return bytes;
}

std::vector<at::Tensor> GradientBuffer::leaves(const std::vector<bool>& used) const {
  std::vector<at::Tensor> leaves;
  for (size_t i = 0; i < members_.size(); ++i)
    if (used.empty() || used[i]) leaves.push_back(members_[i].leaf);
  return leaves;
}

BucketRoute route_of(const GradientBucket& bucket, const Mesh& mesh, int64_t zero_copy_bytes) {
  using Cut = FlatLayout::Cut;
  const Cut cut = bucket.layout.cut();
  const bool may_encode = cut != Cut::kWhole && mesh.shard->size() > 1;
  const bool has_one_member = bucket.members.size() == 1;
  BucketRoute route;
  route.codec = make_wire_codec(may_encode ? bucket.wire : WireFormat::kDtype, bucket.dtype, bucket.wire_dtype);
  const bool sends_pieces =
      route.codec->is_identity() && bucket.layout.full_numel() > 0 && exchanges_pieces(*mesh.shard);
  const bool is_large = sends_pieces && has_one_member && bucket.bytes() >= zero_copy_bytes;
  route.reduces_apart = is_large && cut == Cut::kByOwner;
  // Never adopts on a device, where autograd's gradient and `.grad` may belong to different streams.
  route.adopts = is_large && cut == Cut::kWhole && mesh.world->device().is_cpu();

  if (cut == Cut::kEvenly && sends_pieces) {
    const auto element_bytes = static_cast<int64_t>(c10::elementSize(bucket.dtype));
    route.pieces = cut_into_pieces(bucket.layout, element_bytes, zero_copy_bytes);
  } else {
    route.pieces = {{{0, bucket.layout.full_numel()}}};
    const bool sends_only = cut == Cut::kByOwner && has_one_member && bucket.result == nullptr;
    if (route.adopts || route.reduces_apart || sends_only) route.pieces[0].member = 0;
  }
  route.piece_of = pieces_of_members(bucket, route.pieces);
  return route;
}

}  // namespace tessera::internal
