#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tessera/checkpoint/safetensors_header.h"
#include "tessera/checkpoint/saved_tensors.h"

namespace tessera {

// A box of a tensor that is to be written.
struct Piece {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;  // of the whole tensor
  std::vector<std::string> aliases;
  TensorKind kind = TensorKind::kParameter;
  Box box;
  // The box's elements, row-major and contiguous in host memory. Asked for when they are written,
  // and let go afterwards, so that only one needs to exist at a time.
  std::function<at::Tensor()> data;
};

// Told how many bytes more have been read or written.
using Progress = std::function<void(int64_t bytes)>;

// Writes one safetensors file, new, from pieces of different names, and syncs it. Returns what a
// manifest says of it: one file, of this name; block_bytes 0: without checksums.
SavedTensors write_safetensors(const std::filesystem::path& path, const std::vector<Piece>& pieces,
                               const std::map<std::string, std::string>& metadata, int64_t block_bytes,
                               const Progress& progress = {});

// Writes the pieces to files "<stem>-0.safetensors", "<stem>-1.safetensors", ... in the directory,
// at most one of a name in each, with the metadata that PyTorch's HuggingFaceStorageReader looks for.
SavedTensors write_pieces(const std::filesystem::path& directory, const std::string& stem,
                          const std::vector<Piece>& pieces, int64_t block_bytes, const Progress& progress = {});

// Adds what one rank wrote to what others did.
void append(SavedTensors& all, SavedTensors part);

}  // namespace tessera
