#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "core/gradients/gradient_buffer.h"
#include "core/layout/bucket_pieces.h"
#include "core/layout/flat_layout.h"
#include "core/layout/int8_blocks.h"

namespace tessera::internal {

// Gradients that are collected in one buffer, reduced by one collective and cut as the layout says: evenly (a
// reduce-scatter: FSDP), by owner (one owner, a reduce: SDP), or whole (an all-reduce: DDP).
struct GradientBucket {
  std::string name;                           // for errors: "unit 'blocks.3'"
  std::vector<size_t> members;                // parameters, as the reducer's list has them, in the layout's order
  std::vector<ParameterGeometry> geometries;  // of the members in the bucket
  FlatLayout layout;
  int owner = 0;                             // kByOwner: the only one
  at::ScalarType dtype = at::kFloat;         // gradients are added up in it
  std::optional<at::ScalarType> wire_dtype;  // and travel in it, if they are floating-point; empty: the same
  // In blocks (not where the cut is whole): rounded by each rank, sent to those whose parts they are, added in fp32.
  WireFormat wire = WireFormat::kDtype;
  GradientBuffer* result = nullptr;  // where this rank's part becomes .grad; null: it gets none
  // The tensors that the buffer consists of, in order, at least one; and by member which one it lies in.
  // GradientReducer makes them.
  std::vector<BucketPiece> pieces{};
  std::vector<size_t> piece_of{};
  // Whether a gradient's own memory is reduced in place and becomes .grad. GradientReducer's, too.
  bool adopts = false;
};

}  // namespace tessera::internal
