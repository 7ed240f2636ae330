#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <tessera/errors.h>
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/safetensors_header.h"
#include "checkpoint/format/saved_tensors.h"

namespace tessera::internal {

// These functions find the rank and the file of each part of a tensor (FORMAT.md, "Rank files"). The manifest lists
// each rank's elements. Boxes and file names follow from fixed rules. File headers contain positions and checksums.

std::string rank_file_name(int64_t rank, size_t number);  // returns "rank-00042-0.safetensors"

// Returns the strides of a dense tensor with the saved shape and order of dimensions (SavedTensor::order).
std::vector<int64_t> memory_strides(const SavedTensor& tensor);

// Splits `held`, one rank's elements in memory order, into boxes. The rank stores box k in its file number k.
std::vector<Box> boxes_by_file(const SavedTensor& tensor, Range held);

// Calls `visit` for each rank that holds elements of `range`. `held` is the range of all elements of the tensor that
// the rank holds, and may exceed `range`. For an empty tensor, visits one rank with an empty range.
void for_each_holder(const SavedTensor& tensor, Range range,
                     const std::function<void(int64_t rank, Range held)>& visit);
// Returns the smallest range in memory order that contains the box. For an empty box, returns an empty range.
Range range_of_box(const SavedTensor& tensor, const Box& box);

// Sorts runs by `begin`. Merges adjacent runs that one RankRun can describe. For an empty tensor, keeps one run.
void join_runs(std::vector<RankRun>& runs);

// The verified header of a rank file.
struct RankFile {
  std::map<std::string, SafetensorsEntry> entries;
  std::map<std::string, std::vector<uint64_t>> checksums;  // block checksums of each entry
  GeneratorStates rng;                                     // set only in file 0 of a save with generator states
  int64_t header_bytes = 0;

  // Returns the slice `box` of the tensor `name`. Throws CheckpointError if this file lacks it or contradicts `tensor`.
  SavedSlice slice(const std::string& name, const SavedTensor& tensor, const Box& box, int64_t block_bytes,
                   const std::string& where) const;
};
// Reads a rank file's header. Throws CheckpointError if the file is damaged, or belongs to another checkpoint or rank.
RankFile read_rank_file(const InputFile& file, const SavedTensors& saved, int64_t rank);

// Returns the generator states that a rank saved, or an empty map if the rank saved none.
GeneratorStates generators_of(const Manifest& manifest, int64_t rank);

// Returns `saved` with a list of all files and slices, for programs that read a whole checkpoint. Reads the header of
// each rank file. If saved.by_rank is false, returns `saved`, which has the list already. For a damaged file, throws
// CheckpointError, or calls `on_damage` (if set) and omits the file. Throws StorageUnavailable in both cases.
SavedTensors with_every_slice(const SavedTensors& saved,
                              const std::function<void(const CheckpointError&)>& on_damage = {});

struct RankFileFields {
  int64_t rank = 0;
  uint64_t id = 0;  // id of the checkpoint
  int64_t block_bytes = 0;
  GeneratorStates rng;
};

// Returns a rank file's header, and sets each entry's position. Checksums that `checksums` lacks are written as zeros.
std::string format_rank_header(std::vector<SafetensorsEntry>& entries,
                               const std::map<std::string, std::string>& metadata, const RankFileFields& fields,
                               const std::map<std::string, std::vector<uint64_t>>& checksums, bool with_rng);

}  // namespace tessera::internal
