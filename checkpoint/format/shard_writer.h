#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/format/checksum.h"
#include "checkpoint/format/rank_files.h"
#include "checkpoint/format/safetensors_header.h"
#include "checkpoint/format/saved_tensors.h"

namespace tessera::internal {

// A box of a tensor, to be written to a file.
struct Piece {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;  // sizes of the whole tensor
  std::vector<std::string> aliases;
  TensorKind kind = TensorKind::kParameter;
  Box box;
  // Returns the box's elements, row-major and contiguous in host memory. The writer calls data() once for each piece.
  // It frees each result before the next call, so only one result is in memory at a time.
  std::function<at::Tensor()> data;
  // Only write_rank_files() needs these fields. `memory` is the range of the box's elements in the tensor's memory
  // order. `order` lists the tensor's dimensions by descending stride, or is empty for row-major order.
  Range memory;
  std::vector<int64_t> order;
  // Returns a view of the live tensor's elements in the box, on any device, with any strides. Null if no view exists.
  std::function<at::Tensor()> view = nullptr;
  // Checksums of the blocks of data(), if known. write_rank_files() uses them only if its blocks have the same size.
  BlockChecksums checksums = {};
};
int64_t bytes_of(const Piece& piece);
// Returns whether the tensor can be the result of piece.data(): its dtype, shape, device and layout are right.
bool can_be_data(const Piece& piece, const at::Tensor& tensor);
// Returns piece.data(). Throws std::logic_error if the returned tensor does not match the piece.
at::Tensor checked_data(const Piece& piece);

// A callback whose argument is the number of bytes that were read or written since the last call.
using Progress = std::function<void(int64_t bytes)>;

// Writes the pieces, checksums and generator states to the rank files "rank-00042-0.safetensors", ... (FORMAT.md, "Rank
// files"), and syncs the files. Each file has at most one piece of a tensor. In memory order, each piece of a tensor
// must start where the previous piece ends. Returns the tensors, each with a run that describes this rank's elements.
SavedTensors write_rank_files(const std::filesystem::path& directory, const RankFileFields& fields,
                              const std::vector<Piece>& pieces, const Progress& progress = {});

// append() adds the tensors of other ranks to `all`. Throws CheckpointError if ranks differ in a tensor's shape, dtype,
// kind, order or aliases. After the last append(), join_all() must merge the runs.
void append(SavedTensors& all, SavedTensors part);
void join_all(SavedTensors& saved);

}  // namespace tessera::internal
