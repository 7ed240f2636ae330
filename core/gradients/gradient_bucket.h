#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/layout/flat_layout.h"
#include "core/layout/geometry.h"
#include "core/layout/mesh.h"
#include "core/layout/wire_codec.h"

namespace tessera::internal {

// Makes reduced values the gradients of several leaf tensors. If a leaf's `.grad` is undefined, its values become
// `.grad`; otherwise they are added to `.grad`.
//
// A leaf is a tensor that an optimizer steps: a shard (FSDP), or a whole parameter (DDP, and on the owner under SDP).
// The gradients of one pass are views of one allocation, and nothing else references the allocation. So zero_grad()
// frees it, and the allocator (on a CPU, MemoryCache) reuses its memory for the next pass.
class GradientBuffer {
 public:
  struct Member {
    at::Tensor leaf;
    ParameterGeometry geometry;  // sizes and strides of the leaf's gradient
    int64_t offset = 0;          // offset of the gradient in the buffer, in elements
    // The label for as_part_of_gradient() if other ranks hold other parts of the model's gradients; otherwise "".
    std::string part_label = {};
  };
  // A function that allocates a tensor [numel].
  using Memory = std::function<at::Tensor(int64_t numel, at::ScalarType dtype)>;
  // If `as_views` is false, gradients of several leaves are separate copies, not views of one allocation.
  GradientBuffer(std::vector<Member> members, int64_t numel, at::ScalarType dtype, Memory memory, bool as_views = true);

  int64_t numel() const { return numel_; }
  at::ScalarType dtype() const { return dtype_; }

  // Whether no leaf has a gradient. Values can then become gradients without a copy.
  bool is_free() const;
  // Allocates a tensor [numel()] of `dtype` for values.
  at::Tensor room(at::ScalarType dtype) const { return memory_(numel_, dtype); }

  // Makes `values`, [numel()], the gradients of the leaves whose entry in `used` is true, or adds them to existing
  // gradients. If is_free(), the gradients may share the memory of `values`; the caller must hold the only reference.
  void accept(const at::Tensor& values, const std::vector<bool>& used);

  // Returns the leaves whose entry in `used` is true; all leaves if `used` is empty.
  std::vector<at::Tensor> leaves(const std::vector<bool>& used = {}) const;

  // Returns the bytes of the shared allocation and of all gradients outside this allocation, except placeholders.
  int64_t bytes() const;
  // Returns the shared allocation if every leaf's gradient is a view of it; otherwise an undefined tensor.
  at::Tensor whole_gradient() const;

 private:
  bool is_shared(const at::Tensor& grad) const {  // whether `grad` is a view of the shared allocation
    return grad.defined() && grad.has_storage() &&
           grad.storage().unsafeGetStorageImpl() == shared_._unsafe_get_target();
  }
  at::Tensor as_gradient(const at::Tensor& values, size_t member) const;
  // Returns a detached view, because zero_grad() cannot detach a view that autograd tracks.
  at::Tensor part_of(const at::Tensor& values, size_t member) const {
    return detached_view_in(values, members_[member].geometry, members_[member].offset);
  }

  const std::vector<Member> members_;
  const int64_t numel_;
  const at::ScalarType dtype_;
  const Memory memory_;
  const bool as_views_;
  c10::weak_intrusive_ptr<c10::StorageImpl> shared_{c10::intrusive_ptr<c10::StorageImpl>()};  // the latest allocation
};

// How a bucket's gradients are sent to the other ranks.
struct BucketRoute {
  std::vector<BucketPiece> pieces;         // the tensors that make up the buffer, in order, at least one
  std::vector<size_t> piece_of;            // by member: the index of its piece
  std::shared_ptr<const WireCodec> codec;  // encodes the values to send
  bool adopts = false;                     // the bucket's only gradient is reduced in place, and becomes `.grad`
  bool reduces_apart = false;              // the owner sends from one buffer and receives into another
};

// Gradients that share one buffer and one collective. The layout cuts the buffer in one of three ways: evenly for a
// reduce-scatter (FSDP), by owner for a reduce to one owner (SDP), or whole for an all-reduce (DDP).
struct GradientBucket {
  std::string name;                           // for errors: "unit 'blocks.3'"
  std::vector<size_t> members;                // indices in the reducer's list of parameters, in the layout's order
  std::vector<ParameterGeometry> geometries;  // sizes and strides of the members in the bucket
  FlatLayout layout;
  int owner = 0;                             // the rank that owns the bucket, if it is cut by owner
  at::ScalarType dtype = at::kFloat;         // dtype in which this rank accumulates gradients
  std::optional<at::ScalarType> wire_dtype;  // dtype in which floating-point gradients are sent; empty: `dtype`
  WireFormat wire = WireFormat::kDtype;      // ignored for buckets that are cut whole, and for one rank
  GradientBuffer* result = nullptr;          // turns this rank's part into `.grad`; null if this rank receives no part
  bool is_offloaded = false;                 // the result is copied to the host: see ReducerOptions::to_host

  BucketRoute route{};  // set by GradientReducer

  int64_t bytes() const { return layout.full_numel() * static_cast<int64_t>(c10::elementSize(dtype)); }
};

// The use of parameters and buckets in a pass: by this rank, or combined (a flag is true if it is true on any rank).
struct PassUse {
  std::vector<bool> used;        // by parameter: whether it had a gradient
  std::vector<bool> recomputed;  // by bucket: whether it had gradients after its reduction began
};

// Chooses how the gradients of a bucket are sent in this mesh. Gradients of at least zero_copy_bytes are sent without a
// copy if the group supports this. The result is equal on all ranks, except for `pieces` of a bucket cut by owner.
BucketRoute route_of(const GradientBucket& bucket, const Mesh& mesh, int64_t zero_copy_bytes);

}  // namespace tessera::internal
