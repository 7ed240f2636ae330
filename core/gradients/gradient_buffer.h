#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/layout/geometry.h"

namespace tessera::internal {

// Memory that the gradients of several leaf tensors are views of, and the rules of when a value becomes `.grad`:
// set where there is none, added where there is one, never written where somebody outside still holds it.
//
// A leaf is whatever an optimizer is given: a shard (FSDP), or a whole parameter (DDP, and its owner under SDP).
// The buffer exists from the first gradient on, and is used again by the next step if zero_grad() has let go of it.
// Used by one thread at a time, under no autograd.
class GradientBuffer {
 public:
  struct Member {
    at::Tensor leaf;
    ParameterGeometry geometry;  // of its gradient
    int64_t offset = 0;          // in the buffer, in elements
    // Not empty where other ranks have gradients that this one has no part of: what as_part_of_gradient() calls it.
    std::string part_label = {};
  };
  // Makes a tensor [numel].
  using Memory = std::function<at::Tensor(int64_t numel, at::ScalarType dtype)>;
  // `as_views` false: gradients are tensors of their own, and the buffer holds values on their way only.
  GradientBuffer(std::vector<Member> members, int64_t numel, at::ScalarType dtype, Memory memory, bool as_views = true);

  int64_t numel() const { return numel_; }
  at::ScalarType dtype() const { return dtype_; }

  // Whether no leaf has a gradient, so that values made in room() become gradients where they are.
  bool is_free() const;
  // Where the next values go, [numel()] of `dtype`: the buffer itself if it is_free(), not `busy` (an earlier room()
  // is still in use) and of that dtype, else other memory.
  at::Tensor room(at::ScalarType dtype, bool busy);
  at::Tensor room(bool busy = false) { return room(dtype_, busy); }

  // Makes `values`, which room() gave, the gradient of each leaf that `used` names, or adds them to what is there.
  void accept(const at::Tensor& values, const std::vector<bool>& used);

  // The same for the only leaf, of values in memory of their own that nobody else has: it is the gradient's from now
  // on.
  void adopt(const at::Tensor& values);

  // All leaves, or those that `used` names.
  std::vector<at::Tensor> leaves(const std::vector<bool>& used = {}) const;

  // Bytes of the buffer, 0 while there is none, and of gradients that are no views of it.
  int64_t bytes() const;
  // Of those the ones that are no gradient's: of a buffer that is kept for the next.
  int64_t idle_bytes() const;
  // The buffer if every leaf's gradient is a view of it, else undefined.
  at::Tensor whole_gradient() const;
  // Frees the buffer if no gradient is defined any more.
  void drop_if_unused();

 private:
  bool is_ours_alone() const;
  bool is_in_buffer(size_t member) const {  // its gradient
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
  std::vector<at::Tensor> views_;  // of it, by member
};

}  // namespace tessera::internal
