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
#include <vector>

#include "core/layout/deferred.h"
#include "exported/archive/archive.h"
#include "exported/archive/record.h"

namespace tessera::internal {

// A tensor as an archive describes it.
struct ExportedTensor {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;  // of the first element in its storage, in elements
  bool requires_grad = false;
  ArchiveMember storage{};   // empty if the archive has no values (exported on meta)
  std::string storage_name;  // tensors that share it share memory

  bool has_values() const;
  // Whether they are one tensor of several names.
  bool is_tied_to(const ExportedTensor& other) const;
};

// The tensors of an archive by name, as its configuration lists them. Throws ExportedError for what is pickled, lies
// outside of its storage, or is too large for one.
std::map<std::string, ExportedTensor> read_tensors(const Archive& archive, const ExportRecord& record,
                                                   const std::string& config, const std::string& folder);

// Where the values of a tensor come from: any part of them, in the order of memory.
struct WeightSource {
  at::ScalarType dtype;  // of what `read` gives
  ReadElements read;
};

// From the archive itself; the tensor has to have values, and no holes.
WeightSource read_from(const std::shared_ptr<MappedFile>& file, const ExportedTensor& tensor,
                       std::shared_ptr<std::atomic<int64_t>> bytes_read);

// The same as a tensor whose memory is the mapped file; a copy if it is not aligned.
at::Tensor map_tensor(const std::shared_ptr<MappedFile>& file, const ExportedTensor& tensor);

// Safetensors: a file, an index of several, or a folder of them.
class WeightFiles {
 public:
  // Throws CheckpointError.
  WeightFiles(const std::filesystem::path& path, std::shared_ptr<std::atomic<int64_t>> bytes_read);
  ~WeightFiles();

  // The values of the tensor under one of the names; nothing if they have none. Throws ExportedError for other sizes.
  std::optional<WeightSource> find(const std::vector<std::string>& names, const ExportedTensor& tensor);
  // Names that nobody has asked for.
  std::vector<std::string> unused() const;

 private:
  struct Files;
  std::shared_ptr<Files> files_;
};

// The source with its values converted to another dtype as they are read.
ReadElements converted(WeightSource source, at::ScalarType dtype);

}  // namespace tessera::internal
