#include "core/gradients/gradient_buffer.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "core/gradients/gradient_part.h"
#include "core/layout/tensor_signature.h"
#include "core/paging/residency.h"

namespace tessera::internal {
namespace {

// `grad` may be a sparse one that the leaf had before it was wrapped.
void add_to(at::Tensor& grad, const at::Tensor& values) {
  if (grad.is_sparse()) grad = grad.to_dense();
  grad.add_(values);
}

}  // namespace

GradientBuffer::GradientBuffer(std::vector<Member> members, int64_t numel, at::ScalarType dtype, Memory memory,
                               bool as_views)
    : members_(std::move(members)), numel_(numel), dtype_(dtype), memory_(std::move(memory)), as_views_(as_views) {}

bool GradientBuffer::is_free() const {
  return std::none_of(members_.begin(), members_.end(),
                      [](const Member& member) { return member.leaf.grad().defined(); });
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
      forget_norm(grad);
    } else {
      // Detached: zero_grad() cannot detach a view that autograd knows.
      const at::Tensor part = part_of(values, i);
      grad = as_gradient(becomes_gradient ? part.detach() : part.clone(), i);
    }
  }
}

at::Tensor GradientBuffer::whole_gradient() const {
  for (const Member& member : members_) {
    const at::Tensor& grad = member.leaf.grad();
    if (!is_shared(grad) || !is_view_at(grad, member.geometry, member.offset)) return {};
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

}  // namespace tessera::internal
