#include "core/gradients/gradient_buffer.h"

#include <algorithm>
#include <utility>

#include "core/gradients/gradient_part.h"
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

at::Tensor GradientBuffer::room(at::ScalarType dtype, bool busy) {
  if (dtype != dtype_ || busy || !as_views_ || !is_free()) return memory_(numel_, dtype);
  if (!grad_.defined() || !is_ours_alone()) {
    grad_ = memory_(numel_, dtype_);
    views_.clear();
    // Detached: zero_grad() cannot detach a view that autograd knows.
    for (size_t i = 0; i < members_.size(); ++i) views_.push_back(as_gradient(part_of(grad_, i).detach(), i));
  }
  return grad_;
}

at::Tensor GradientBuffer::as_gradient(const at::Tensor& values, size_t member) const {
  const std::string& label = members_[member].part_label;
  return label.empty() ? values : as_part_of_gradient(values, label);
}

// Whether the user holds no gradient of the last step, so that the buffer may be overwritten.
bool GradientBuffer::is_ours_alone() const {
  for (const at::Tensor& view : views_)
    if (view.use_count() > 1) return false;
  return grad_.storage().use_count() == views_.size() + 1;
}

void GradientBuffer::accept(const at::Tensor& values, const std::vector<bool>& used) {
  if (values.scalar_type() != dtype_) {
    const at::Tensor exact = room();
    exact.copy_(values);
    return accept(exact, used);
  }
  const bool in_place = values.is_same(grad_);
  if (!in_place && std::all_of(used.begin(), used.end(), [](bool is_used) { return is_used; }) &&
      whole_gradient().defined()) {
    grad_.add_(values);
    for (const at::Tensor& view : views_) forget_norm(view);
    return;
  }
  for (size_t i = 0; i < members_.size(); ++i) {
    if (!used[i]) continue;
    at::Tensor& grad = members_[i].leaf.mutable_grad();
    if (in_place) {
      if (grad.defined()) views_[i].add_(grad);  // the user's graph reached the leaf itself
      grad = views_[i];
    } else if (grad.defined()) {
      add_to(grad, part_of(values, i));
    } else {
      grad = as_gradient(part_of(values, i).clone(), i);
    }
    forget_norm(grad);
  }
}

void GradientBuffer::adopt(const at::Tensor& values) {
  at::Tensor& grad = members_[0].leaf.mutable_grad();
  if (grad.defined()) {
    add_to(grad, part_of(values, 0));
  } else {
    drop_if_unused();
    grad = as_gradient(part_of(values, 0).detach(), 0);
  }
  forget_norm(grad);
}

at::Tensor GradientBuffer::whole_gradient() const {
  if (!grad_.defined()) return {};
  for (size_t i = 0; i < members_.size(); ++i)
    if (!is_in_buffer(i)) return {};
  return grad_;
}

int64_t GradientBuffer::bytes() const {
  int64_t bytes = grad_.defined() ? static_cast<int64_t>(grad_.nbytes()) : 0;
  for (size_t i = 0; i < members_.size(); ++i) {
    const at::Tensor& grad = members_[i].leaf.grad();
    if (grad.defined() && !is_in_buffer(i) && !is_paged(grad)) bytes += static_cast<int64_t>(grad.nbytes());
  }
  return bytes;
}

int64_t GradientBuffer::idle_bytes() const {
  int64_t bytes = 0;
  for (size_t i = 0; i < views_.size(); ++i)
    if (!is_in_buffer(i)) bytes += static_cast<int64_t>(views_[i].nbytes());
  return bytes;
}

std::vector<at::Tensor> GradientBuffer::leaves(const std::vector<bool>& used) const {
  std::vector<at::Tensor> leaves;
  for (size_t i = 0; i < members_.size(); ++i)
    if (used.empty() || used[i]) leaves.push_back(members_[i].leaf);
  return leaves;
}

void GradientBuffer::drop_if_unused() {
  if (!is_free()) return;
  views_.clear();
  grad_.reset();
}

}  // namespace tessera::internal
