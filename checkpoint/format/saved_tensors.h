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
  std::string name;  // In the directory; the whole path if it is the target of a symbolic link there.
  int64_t bytes = 0;
  int64_t header_bytes = 0;
  uint64_t header_checksum = 0;
};

// A box of a tensor in a file, row-major.
struct SavedSlice {
  int file = 0;       // index in SavedTensors::files
  int64_t begin = 0;  // first byte in the file
  Box box;
  std::vector<uint64_t> checksums;  // one for each block; none outside checkpoints
};

enum class TensorKind { kParameter, kBuffer, kState, kBeside };  // kBeside: a Stateful wrote it

// The elements of a tensor that some ranks hold: `count` ranks (rank, rank + rank_step, ...) hold `numel` elements
// each, one after the other from `begin` on, in memory order.
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
  std::vector<SavedSlice> slices;  // if listed
  // If not listed, the slices follow from these (rank_files.h): the dimensions from the slowest in memory to the
  // fastest (empty for row-major), and the ranks' elements in memory order.
  std::vector<int64_t> order;
  std::vector<RankRun> runs;
};

// Locates the slices of all tensors in files. A value type that accesses no file.
struct SavedTensors {
  std::filesystem::path directory;
  std::vector<SavedFile> files;
  std::map<std::string, SavedTensor> tensors;
  int64_t block_bytes = 0;  // bytes that one checksum covers; 0: no checksums
  // If true, files are not listed: rank_files.h derives those of world_size ranks, which contain the checkpoint's id.
  bool by_rank = false;
  int64_t world_size = 0;
  uint64_t id = 0;
  bool has_rng = false;  // rank files include random generator states
};

// Checks that every slice is inside its tensor and its file, and that slices share no byte. Checks that the slices (or
// runs) of each tensor cover it without overlap. Otherwise throws CheckpointError that starts with `where`.
void check_saved_tensors(const SavedTensors& saved, const std::string& where);

// The bytes of the data, without headers.
int64_t bytes_of(const SavedTensors& saved);
int64_t bytes_of(const SavedTensor& tensor);
int64_t bytes_of(const SavedTensor& tensor, const SavedSlice& slice);

}  // namespace tessera::internal
