#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/format/box.h"

namespace tessera::internal {

struct SavedFile {
  std::string name;  // in the directory; what a symbolic link there leads to has its whole path
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

enum class TensorKind { kParameter, kBuffer, kState, kBeside };  // kBeside: of a Stateful

// What some ranks hold of a tensor: `count` of them, rank, rank + rank_step, ..., hold `numel` elements each, one after
// the other from `begin` on, in the order of memory.
struct RankRun {
  int64_t rank = 0;
  int64_t rank_step = 0;
  int64_t count = 1;
  int64_t begin = 0;
  int64_t numel = 0;
  bool operator==(const RankRun&) const = default;
};

struct SavedTensor {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;
  std::vector<std::string> aliases;
  TensorKind kind = TensorKind::kParameter;
  std::vector<SavedSlice> slices;  // where they are listed
  // Where they are known by rank instead (rank_files.h): dimensions from the slowest in memory to the fastest, empty
  // for row-major; and who holds what, in the order of memory.
  std::vector<int64_t> order;
  std::vector<RankRun> runs;
};

// Tensors in files: where each part of each lies. A plan; nothing here touches a file.
struct SavedTensors {
  std::filesystem::path directory;
  std::vector<SavedFile> files;
  std::map<std::string, SavedTensor> tensors;
  int64_t block_bytes = 0;  // that a checksum covers; 0: the files have none
  // The files of so many ranks are known by rule, not listed, and have the checkpoint's id in them.
  bool by_rank = false;
  int64_t world_size = 0;
  uint64_t id = 0;
  bool has_rng = false;  // also the states of the ranks' random generators
};

// Throws CheckpointError unless every slice lies inside its tensor and its file, no two in a file share a byte, and
// each tensor's slices do not overlap and are together the tensor; or, by rank, the runs are so. `where` begins the
// message.
void check_saved_tensors(const SavedTensors& saved, const std::string& where);

// Bytes of the data: of all tensors, of one, and of a slice of it.
int64_t bytes_of(const SavedTensors& saved);
int64_t bytes_of(const SavedTensor& tensor);
int64_t bytes_of(const SavedTensor& tensor, const SavedSlice& slice);

}  // namespace tessera::internal
