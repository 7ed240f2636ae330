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
  // Returns the box's elements, row-major and contiguous in host memory. The writer calls data() when it writes the
  // piece, and frees the result before the next piece, so that only one result is in memory.
  std::function<at::Tensor()> data;
  // Used by write_rank_files(): the positions of the box's elements in memory order, and the tensor's dimensions by
  // descending stride (empty: row-major).
  Range memory;
  std::vector<int64_t> order;
  // Returns the box's elements in the live tensor, on any device and with any strides. Null: only data() has them.
  std::function<at::Tensor()> view = nullptr;
};
int64_t bytes_of(const Piece& piece);
// Returns piece.data(). Throws std::logic_error if the tensor does not match the piece.
at::Tensor checked_data(const Piece& piece);

// Called with the number of bytes read or written since the last call.
using Progress = std::function<void(int64_t bytes)>;

// Writes the pieces to new files "<stem>-0.safetensors", "<stem>-1.safetensors", ... in the directory and syncs them.
// Each file has at most one piece of a tensor, and the metadata that PyTorch's HuggingFaceStorageReader expects.
// Returns the files and slices for a manifest. If block_bytes is 0, writes no checksums.
SavedTensors write_pieces(const std::filesystem::path& directory, const std::string& stem,
                          const std::vector<Piece>& pieces, int64_t block_bytes);

// Writes the pieces as the files of a rank (FORMAT.md, "Rank files"): "rank-00042-0.safetensors", ..., with checksums
// and generator states. Each piece of a tensor must start where its previous piece ends. Returns the tensors with this
// rank's runs.
SavedTensors write_rank_files(const std::filesystem::path& directory, const RankFileFields& fields,
                              const std::vector<Piece>& pieces, const Progress& progress = {});

// Adds the tensors written by one rank to those of other ranks. After the last append(), call join_all() to merge runs.
void append(SavedTensors& all, SavedTensors part);
void join_all(SavedTensors& saved);

}  // namespace tessera::internal
