#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <tessera/checkpoint/options.h>
#include <tessera/model/model_shards.h>

namespace tessera {

// Functions that save and load whole models as safetensors files, under the module's own names. Python's safetensors
// and Hugging Face's programs read and write such files. The files have parameters and buffers only.

// Options of save_full() and write_full(). Must be equal on all ranks.
struct SaveFullOptions {
  // A model of more bytes is split into several files with an index: "<stem>-00001-of-00003.safetensors", ...,
  // "<stem>.safetensors.index.json". A single tensor is never split. 0: one file of any size.
  int64_t max_file_bytes = 0;

  // Maps the model's name of a parameter or buffer to its name in the file; "" omits the name. If all names of a tied
  // weight are omitted, the weight is omitted. No two names may become equal. Not set: names are equal.
  std::function<std::string(const std::string& name)> rename{};

  // Returns whether the file stores the tensor of this name in the model transposed (Hugging Face's Conv1D). Such a
  // tensor must have two dimensions. Not set: no tensor is transposed.
  std::function<bool(const std::string& name)> transposed{};
};

// Writes the local file `file` ("model.safetensors"). Collective. Each rank writes its shards in place, without a
// gather. At the end, one rename makes the file appear or replaces the old one. If the model is split, the files get
// new names, and renaming their index commits them. The old files are then removed. Throws like save_checkpoint().
// Throws std::invalid_argument if `rename` or `transposed` does not fit the model, or differs between ranks.
void save_full(const std::filesystem::path& file, ModelShards& model, const SaveFullOptions& options = {});

// Loads a file of save_full(), an index, or a directory of safetensors files. The directory may be the output of
// PyTorch's HuggingFaceStorageWriter, a snapshot of a model hub, or a hub's cache whose refs/main names a snapshot. If
// an index exists ("<path>.index.json", or an index in the directory), reads only the files that it lists. Each rank
// reads only its part; no checksums are verified. Collective. Throws like load_checkpoint().
void load_full(const std::filesystem::path& path, ModelShards& model, const LoadOptions& options = {});

// The description of a tensor in a full file.
struct FullTensor {
  std::string name{};
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape{};
  std::vector<std::string> aliases{};
};

// Returns the tensors at `path` (as in load_full()), sorted by name. Not collective. Throws CheckpointError.
std::vector<FullTensor> list_full(const std::filesystem::path& path);

// Reads the tensor with the name or alias `name` into host memory. `path` is as in load_full(). Not collective. Throws
// CheckpointError.
at::Tensor read_full(const std::filesystem::path& path, const std::string& name);

// Writes full files from one process, one tensor at a time. data(t) must return the values of `t`, an entry of
// `tensors`, row-major in host memory. Calls progress(bytes) after each tensor. The files appear when all of them are
// complete. Throws CheckpointError. Throws std::invalid_argument if `rename` or `transposed` does not fit `tensors`.
void write_full(const std::filesystem::path& file, const std::vector<FullTensor>& tensors,
                const std::function<at::Tensor(const FullTensor&)>& data, const SaveFullOptions& options = {},
                const std::function<void(int64_t bytes)>& progress = {});

}  // namespace tessera
