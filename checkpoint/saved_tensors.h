#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "tessera/checkpoint/box.h"

namespace tessera {

struct SavedFile {
  std::string name;  // in the directory
  int64_t bytes = 0;
  int64_t header_bytes = 0;
  uint64_t header_checksum = 0;
};

// A box of a tensor in a file, row-major.
struct SavedSlice {
  int file = 0;       // of SavedTensors::files
  int64_t begin = 0;  // first byte in the file
  Box box;
  std::vector<uint64_t> checksums;  // one a block; none in files that are not a checkpoint's own
};

enum class TensorKind { kParameter, kBuffer, kState };

struct SavedTensor {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;
  std::vector<std::string> aliases;
  TensorKind kind = TensorKind::kParameter;
  std::vector<SavedSlice> slices;
};

// Tensors in files: where each part of each lies. A plan; nothing here touches a file.
struct SavedTensors {
  std::filesystem::path directory;
  std::vector<SavedFile> files;
  std::map<std::string, SavedTensor> tensors;
  int64_t block_bytes = 0;  // that a checksum covers; 0: the files have none
};

// Throws CheckpointError unless every slice lies inside its tensor and its file, no two in a file
// share a byte, and each tensor's slices do not overlap and are together the tensor. `where` begins
// the message.
void check_saved_tensors(const SavedTensors& saved, const std::string& where);

// Bytes of a tensor, and of a slice of it.
int64_t bytes_of(const SavedTensor& tensor);
int64_t bytes_of(const SavedTensor& tensor, const SavedSlice& slice);

}  // namespace tessera
