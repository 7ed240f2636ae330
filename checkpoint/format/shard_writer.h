#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/format/rank_files.h"
#include "checkpoint/format/safetensors_header.h"
#include "checkpoint/format/saved_tensors.h"

namespace tessera::internal {

// A box of a tensor that is to be written.
struct Piece {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;  // sizes of the whole tensor
  std::vector<std::string> aliases;
  TensorKind kind = TensorKind::kParameter;
  Box box;
  // Returns the box's elements, row-major and contiguous in host memory. The writer calls data() once for each piece.
  // It frees the result before the next piece, so that only one result is in memory at a time.
  std::function<at::Tensor()> data;
  // write_rank_files() uses these fields. `memory` has the positions of the box's elements in memory order. `order`
  // lists the tensor's dimensions by descending stride, or is empty for row-major order.
  Range memory;
  std::vector<int64_t> order;
  // Returns a view of the box's elements in the live tensor, on any device and with any strides. Null if there is none.
  std::function<at::Tensor()> view = nullptr;
};
int64_t bytes_of(const Piece& piece);
// Returns piece.data(). Throws std::logic_error if the tensor does not match the piece.
at::Tensor checked_data(const Piece& piece);

// A callback whose argument is the number of bytes that were read or written since the last call.
using Progress = std::function<void(int64_t bytes)>;

// Writes the pieces to the rank files "rank-00042-0.safetensors", ... (FORMAT.md, "Rank files"), with checksums and
// generator states, and syncs them. Each file contains at most one piece of a tensor. Each piece of a tensor must start
// where the tensor's previous piece ends. Returns the tensors, each with a run that describes this rank's elements.
SavedTensors write_rank_files(const std::filesystem::path& directory, const RankFileFields& fields,
                              const std::vector<Piece>& pieces, const Progress& progress = {});

// append() adds one rank's tensors to `all`. join_all() merges adjacent runs; must be called after the last append().
void append(SavedTensors& all, SavedTensors part);
void join_all(SavedTensors& saved);

}  // namespace tessera::internal
