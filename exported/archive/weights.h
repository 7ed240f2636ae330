#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/layout/deferred.h"
#include "exported/archive/archive.h"
#include "exported/archive/record.h"

namespace tessera::internal {

// An archive's description of a tensor.
struct ExportedTensor {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;  // offset of the first element in the storage, in elements
  bool requires_grad = false;
  ArchiveMember storage{};   // empty for a tensor without values (on the meta device)
  std::string storage_name;  // tensors with the same storage name share memory

  bool has_values() const;
};

// Returns the tensors that the member `config` lists, by name. Members in `folder` are their storages. Throws
// ExportedError for a tensor that is pickled, is not dense, exceeds its storage, or is too large.
std::map<std::string, ExportedTensor> read_tensors(const Archive& archive, const ExportRecord& record,
                                                   const std::string& config, const std::string& folder);

// A function that reads any part of a tensor's values, in memory order.
struct WeightSource {
  at::ScalarType dtype;  // dtype of the values that `read` writes
  ReadElements read;
};

// Returns a source that reads from the archive, and adds to `bytes_read`. The tensor must have values and no holes. If
// `is_checked`, the rank that reads the first element also verifies the storage's checksum.
WeightSource read_from(const std::shared_ptr<ArchiveFile>& file, const ExportedTensor& tensor, bool is_checked,
                       std::shared_ptr<std::atomic<int64_t>> bytes_read);

// Reads whole storages of an archive. As in Python, tensors of the same storage share memory.
class StorageReader {
 public:
  StorageReader(std::shared_ptr<ArchiveFile> file, bool is_checked) : file_(std::move(file)), is_checked_(is_checked) {}

  at::Tensor read(const ExportedTensor& tensor);

 private:
  const std::shared_ptr<ArchiveFile> file_;
  const bool is_checked_;
  std::map<int64_t, std::weak_ptr<at::Tensor>> storages_;  // storages by offset in the archive, owned by their tensors
};

// The tensors in a safetensors file, in the files of an index, or in a folder of files.
class WeightFiles {
 public:
  // Opens the files at `path`. Adds the number of bytes read to `bytes_read`. Throws CheckpointError on failure.
  WeightFiles(const std::filesystem::path& path, std::shared_ptr<std::atomic<int64_t>> bytes_read);
  ~WeightFiles();

  // Returns a source for a tensor with these tied names, or nullopt if the files have none of them. Throws
  // ExportedError if the sizes differ. The source throws ExportedError if the files have different values under these
  // names.
  std::optional<WeightSource> find(const std::vector<std::string>& names, const ExportedTensor& tensor);
  // Returns the names of tensors that the files have, but no call of find() has requested.
  std::vector<std::string> unused() const;

 private:
  struct Files;
  std::shared_ptr<Files> files_;
};

// Returns a function that reads values from `source` and converts them to `dtype`.
ReadElements converted(WeightSource source, at::ScalarType dtype);

}  // namespace tessera::internal
