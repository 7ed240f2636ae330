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
  std::vector<int64_t> shape;  // of the whole tensor
  std::vector<std::string> aliases;
  TensorKind kind = TensorKind::kParameter;
  Box box;
  // The box's elements, row-major and contiguous in host memory. Asked for when they are written, and let go
  // afterwards, so that only one needs to exist at a time.
  std::function<at::Tensor()> data;
  // Where the tensor lies in memory: the box's elements in that order, and its dimensions from the slowest to the
  // fastest, empty for row-major. For write_rank_files().
  Range memory;
  std::vector<int64_t> order;
  // The same elements where the tensor lies, on a device too, in any strides. Empty: data() alone gives them.
  std::function<at::Tensor()> view = nullptr;
};
int64_t bytes_of(const Piece& piece);
// piece.data(). Throws std::logic_error if that is something else.
at::Tensor checked_data(const Piece& piece);

// Told how many bytes more have been read or written.
using Progress = std::function<void(int64_t bytes)>;

// Writes the pieces to new files "<stem>-0.safetensors", "<stem>-1.safetensors", ... in the directory, at most one of a
// name in each, with the metadata that PyTorch's HuggingFaceStorageReader looks for, and syncs them. Returns what a
// manifest says of them; block_bytes 0: without checksums.
SavedTensors write_pieces(const std::filesystem::path& directory, const std::string& stem,
                          const std::vector<Piece>& pieces, int64_t block_bytes);

// The same as the files of a rank (FORMAT.md, "Rank files"): "rank-00042-0.safetensors", ..., with checksums and the
// generators' states beside the data. A piece of a tensor begins where the one before of that tensor ends. Returns the
// tensors with this rank's runs.
SavedTensors write_rank_files(const std::filesystem::path& directory, const RankFileFields& fields,
                              const std::vector<Piece>& pieces, const Progress& progress = {});

// Adds what one rank wrote to what others did. Of tensors by rank the runs are to be joined in the end: join_all().
void append(SavedTensors& all, SavedTensors part);
void join_all(SavedTensors& saved);

}  // namespace tessera::internal
