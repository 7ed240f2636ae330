#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/gradients/gradient_buffer.h"
#include "core/layout/bucket_pieces.h"
#include "core/layout/flat_layout.h"
#include "core/layout/int8_blocks.h"
#include "core/layout/mesh.h"

namespace tessera::internal {

// The way of a bucket's gradients to the other ranks.
struct BucketRoute {
  std::vector<BucketPiece> pieces;         // the tensors that make up the buffer, in order, at least one
  std::vector<size_t> piece_of;            // by member
  std::shared_ptr<const WireCodec> codec;  // of sent values
  bool adopts = false;                     // a gradient is reduced in its own memory, which becomes `.grad`
  bool reduces_apart = false;              // the owner receives into other memory than it sends from
};

// Gradients that share one buffer and one collective. The layout says how the buffer is cut: evenly (a reduce-scatter:
// FSDP), by owner (one owner, a reduce: SDP), or whole (an all-reduce: DDP).
struct GradientBucket {
  std::string name;                           // for errors: "unit 'blocks.3'"
  std::vector<size_t> members;                // parameters, as indices of the reducer's list, in the layout's order
  std::vector<ParameterGeometry> geometries;  // of the members in the bucket
  FlatLayout layout;
  int owner = 0;                             // kByOwner: the only one
  at::ScalarType dtype = at::kFloat;         // in which gradients are summed on this rank
  std::optional<at::ScalarType> wire_dtype;  // in which floating-point gradients are sent; empty: `dtype`
  WireFormat wire = WireFormat::kDtype;      // not for buckets that are cut whole
  GradientBuffer* result = nullptr;          // makes this rank's part `.grad`; null if this rank gets no part

  BucketRoute route{};  // GradientReducer derives it

  int64_t bytes() const { return layout.full_numel() * static_cast<int64_t>(c10::elementSize(dtype)); }
};

// Decides how the gradients of a bucket travel in this mesh. Gradients of at least zero_copy_bytes are sent without a
// copy if the group can. Equal on all ranks, except for `pieces` of a bucket that is cut by owner.
BucketRoute route_of(const GradientBucket& bucket, const Mesh& mesh, int64_t zero_copy_bytes);

}  // namespace tessera::internal
