#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/layout/geometry.h"

namespace tessera::internal {

// Memory for the gradients of several leaf tensors, which are views of it. A reduced value becomes `.grad` if there is
// none, and is added to one that is there. A gradient that the user still holds is never overwritten.
//
// A leaf is a tensor that an optimizer is given: a shard (FSDP), or a whole parameter (DDP, and its owner under SDP).
// The buffer is allocated for the first gradient. The next step reuses it if zero_grad() has dropped its views. Used by
// one thread at a time, under no autograd.
class GradientBuffer {
 public:
  struct Member {
    at::Tensor leaf;
    ParameterGeometry geometry;  // of its gradient
    int64_t offset = 0;          // in the buffer, in elements
    // Not empty if other ranks hold the rest of the gradient: its label for as_part_of_gradient().
    std::string part_label = {};
  };
  // Allocates a tensor [numel].
  using Memory = std::function<at::Tensor(int64_t numel, at::ScalarType dtype)>;
  // If `as_views` is false, gradients are separate tensors, and the buffer holds values only until accept().
  GradientBuffer(std::vector<Member> members, int64_t numel, at::ScalarType dtype, Memory memory, bool as_views = true);

  int64_t numel() const { return numel_; }
  at::ScalarType dtype() const { return dtype_; }

  // Whether no leaf has a gradient, so that values in room() become gradients without a copy.
  bool is_free() const;
  // Returns memory for the next values, [numel()] of `dtype`: the buffer itself if it is_free(), has that dtype and is
  // not `busy` (the memory of an earlier room() is still in use); other memory if not.
  at::Tensor room(at::ScalarType dtype, bool busy);
  at::Tensor room(bool busy = false) { return room(dtype_, busy); }

  // Makes `values`, in the memory of room(), the gradients of the leaves in `used`, or adds them to those.
  void accept(const at::Tensor& values, const std::vector<bool>& used);

  // Makes `values` the gradient of the only leaf, without a copy, or adds them to it. The caller must hold the only
  // reference.
  void adopt(const at::Tensor& values);

  // All leaves, or those in `used`.
  std::vector<at::Tensor> leaves(const std::vector<bool>& used = {}) const;

  // Bytes of the buffer, and of gradients that are not views of it.
  int64_t bytes() const;
  // Bytes of the buffer that no gradient uses.
  int64_t idle_bytes() const;
  // The buffer if every leaf's gradient is a view of it; undefined if not.
  at::Tensor whole_gradient() const;
  // Frees the buffer if no gradient is defined.
  void drop_if_unused();

 private:
  bool is_ours_alone() const;
  bool is_in_buffer(size_t member) const {  // whether its gradient is a view of the buffer
    return member < views_.size() && members_[member].leaf.grad().is_same(views_[member]);
  }
  at::Tensor as_gradient(const at::Tensor& values, size_t member) const;
  at::Tensor part_of(const at::Tensor& values, size_t member) const {
    return view_in(values, members_[member].geometry, members_[member].offset);
  }

  const std::vector<Member> members_;
  const int64_t numel_;
  const at::ScalarType dtype_;
  const Memory memory_;
  const bool as_views_;
  at::Tensor grad_;
  std::vector<at::Tensor> views_;  // of the buffer, by member
};

}  // namespace tessera::internal
