#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <tessera/checkpoint_options.h>
#include <tessera/model_shards.h>

namespace tessera {

// Whole models in safetensors files under the module's own names, as Python's safetensors and Hugging Face's programs
// read and write them. Parameters and buffers, no optimizer.

// How save_full() and write_full() cut a model into files. The same on all ranks.
struct SaveFullOptions {
  // Above this many bytes of tensors, several files and an index: "<stem>-00001-of-00003.safetensors", ...,
  // "<stem>.safetensors.index.json". A tensor is never split. 0: one file, however large.
  int64_t max_file_bytes = 0;
};

// Writes `file` ("model.safetensors"), collectively: each rank writes its own shards to their places in it, and nothing
// is gathered. When all ranks are done the files appear, or replace older ones, by one rename: several files have names
// that none had before, and their index, renamed last, decides; what the index before it listed is removed then. Errors
// as of save_checkpoint().
void save_full(const std::filesystem::path& file, ModelShards& model, const SaveFullOptions& options = {});

// Loads such a file, an index, or a directory of safetensors files, among them what PyTorch's HuggingFaceStorageWriter
// writes (whole tensors, or each rank's slices) and the caches of model hubs, which are made of symbolic links: a
// snapshot, or the root, whose refs/main says which. Where there is an index, "<path>.index.json" or one in the
// directory, what it does not list is not read. Each rank reads what it needs; there are no checksums to verify.
// Collective; everything else as of load_checkpoint().
void load_full(const std::filesystem::path& path, ModelShards& model, const LoadOptions& options = {});

// A tensor of a full file.
struct FullTensor {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;
  std::vector<std::string> aliases;
};

// Writes full files from tensors that `data` gives one at a time (row-major, in host memory): for programs of one
// process. Memory of one tensor. Throws CheckpointError; the files appear at the end.
void write_full(const std::filesystem::path& file, const std::vector<FullTensor>& tensors,
                const std::function<at::Tensor(const FullTensor&)>& data, const SaveFullOptions& options = {},
                const std::function<void(int64_t bytes)>& progress = {});

}  // namespace tessera
