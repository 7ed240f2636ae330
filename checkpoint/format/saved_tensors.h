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
  std::string name;  // file name in the directory; for a symbolic link, the absolute path of its target
  int64_t bytes = 0;
  int64_t header_bytes = 0;
  uint64_t header_checksum = 0;
};

// A box of a tensor, stored row-major in one file.
struct SavedSlice {
  int file = 0;       // index in SavedTensors::files
  int64_t begin = 0;  // position of the first byte in the file
  Box box;
  std::vector<uint64_t> checksums;  // one for each block; empty if SavedTensors::block_bytes is 0
};

enum class TensorKind { kParameter, kBuffer, kState, kBeside };  // kBeside: a tensor of a Stateful object

// Parts of a tensor on several ranks, all of equal size. The `count` ranks rank, rank + rank_step, ... hold `numel`
// elements each. Their parts are adjacent in memory order. The first part begins at element `begin`.
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
  std::vector<SavedSlice> slices;  // empty if SavedTensors::by_rank is true
  // Used if SavedTensors::by_rank is true: the functions of rank_files.h compute the slices from these fields. `order`
  // lists the dimensions by descending stride; empty means row-major. `runs` lists the ranks' elements in memory order.
  std::vector<int64_t> order;
  std::vector<RankRun> runs;
};

// A list of saved tensors with the positions of their slices in files. A value type that accesses no file.
struct SavedTensors {
  std::filesystem::path directory;
  std::vector<SavedFile> files;
  std::map<std::string, SavedTensor> tensors;
  int64_t block_bytes = 0;  // number of bytes that one checksum covers; 0 if there are no checksums
  // If true, the data is in rank files, whose headers contain `id`. `files` is empty: rank_file_name() gives the names.
  bool by_rank = false;
  int64_t world_size = 0;
  uint64_t id = 0;
  bool has_rng = false;  // whether rank files include random generator states
};

// Checks that every slice is inside its tensor and its file, and that slices share no byte of a file. Also checks that
// slices (or runs) cover each tensor without overlap. Throws CheckpointError with a text that starts with `where`.
void check_saved_tensors(const SavedTensors& saved, const std::string& where);

// Return the data size in bytes of all tensors, of one tensor or of one slice, without file headers.
int64_t bytes_of(const SavedTensors& saved);
int64_t bytes_of(const SavedTensor& tensor);
int64_t bytes_of(const SavedTensor& tensor, const SavedSlice& slice);

}  // namespace tessera::internal
