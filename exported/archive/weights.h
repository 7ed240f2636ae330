#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
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
  int64_t offset = 0;  // position of the first element in the storage, in elements
  bool requires_grad = false;
  ArchiveMember storage{};   // empty for a tensor on the meta device, which has no values
  std::string storage_name;  // tensors with equal names share memory

  bool has_values() const;
  // Returns whether the two are one tensor under two names.
  bool is_tied_to(const ExportedTensor& other) const;
};

// Returns the tensors that an archive's configuration lists, by name. Throws ExportedError for a tensor that is
// pickled, exceeds its storage, or is too large.
std::map<std::string, ExportedTensor> read_tensors(const Archive& archive, const ExportRecord& record,
                                                   const std::string& config, const std::string& folder);

// Reads any part of a tensor's values, in memory order.
struct WeightSource {
  at::ScalarType dtype;  // dtype of the values that `read` returns
  ReadElements read;
};

// Reads from the archive. The tensor must have values and no holes. If `is_checked`, a read of the first element also
// verifies the checksum of the whole storage, so that one of several ranks verifies it.
WeightSource read_from(const std::shared_ptr<ArchiveFile>& file, const ExportedTensor& tensor, bool is_checked,
                       std::shared_ptr<std::atomic<int64_t>> bytes_read);

// Reads whole storages of an archive. Tensors of one storage share its memory, as in Python.
class StorageReader {
 public:
  StorageReader(std::shared_ptr<ArchiveFile> file, bool is_checked) : file_(std::move(file)), is_checked_(is_checked) {}

  at::Tensor read(const ExportedTensor& tensor);

 private:
  const std::shared_ptr<ArchiveFile> file_;
  const bool is_checked_;
  std::map<int64_t, std::weak_ptr<at::Tensor>> storages_;  // by offset in the archive; tensors own the storages
};

// The tensors of a safetensors file, of an index of several files, or of a folder.
class WeightFiles {
 public:
  // Opens the files at `path`. Counts the bytes that are read in `bytes_read`. Throws CheckpointError.
  WeightFiles(const std::filesystem::path& path, std::shared_ptr<std::atomic<int64_t>> bytes_read);
  ~WeightFiles();

  // Returns a source of the values under the first known name; nullopt if none is known. Throws if sizes differ.
  std::optional<WeightSource> find(const std::vector<std::string>& names, const ExportedTensor& tensor);
  // Returns the names of tensors in the files for which find() was never called.
  std::vector<std::string> unused() const;

 private:
  struct Files;
  std::shared_ptr<Files> files_;
};

// Returns a function that reads from `source` and converts the values to `dtype`.
ReadElements converted(WeightSource source, at::ScalarType dtype);

}  // namespace tessera::internal
