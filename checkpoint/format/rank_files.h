#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/errors.h>
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/safetensors_header.h"
#include "checkpoint/format/saved_tensors.h"

namespace tessera::internal {

// These functions find the rank and the file that hold each part of a tensor (FORMAT.md, "Rank files"). The manifest
// lists each rank's elements, rules give boxes and file names, and file headers give positions and checksums.

std::string rank_file_name(int64_t rank, size_t number);  // "rank-00042-0.safetensors"

// Returns the strides that the tensor had in memory when it was saved.
std::vector<int64_t> memory_strides(const SavedTensor& tensor);

// Splits `held`, one rank's elements in memory order, into the boxes that the rank stores. Box k is in its file k.
std::vector<Box> boxes_by_file(const SavedTensor& tensor, Range held);

// Visits each rank that holds elements of `range`. `held` is the whole part of that rank, and may exceed `range`. For
// an empty tensor, visits one rank with an empty range.
void for_each_holder(const SavedTensor& tensor, Range range,
                     const std::function<void(int64_t rank, Range held)>& visit);
// Returns the smallest range in memory order that contains the box; an empty range for an empty box.
Range range_of_box(const SavedTensor& tensor, const Box& box);

// Sorts runs by `begin` and merges adjacent runs of equal size and rank step. Keeps one run of an empty tensor.
void join_runs(std::vector<RankRun>& runs);

// The checked header of one file of a rank.
struct RankFile {
  std::map<std::string, SafetensorsEntry> entries;
  std::map<std::string, std::vector<uint64_t>> checksums;  // by entry: the checksums of its blocks
  GeneratorStates rng;                                     // only in file 0, and only if the save included them
  int64_t header_bytes = 0;

  // Returns the slice with this box. Throws CheckpointError if the file lacks the tensor, or if shape or dtype differ.
  SavedSlice slice(const std::string& name, const SavedTensor& tensor, const Box& box, int64_t block_bytes,
                   const std::string& where) const;
};
// Reads a rank's file header. Throws CheckpointError for damage, and for a file of another checkpoint or rank.
RankFile read_rank_file(const InputFile& file, const SavedTensors& saved, int64_t rank);

// Returns the generator states that a rank saved, or an empty map.
GeneratorStates generators_of(const Manifest& manifest, int64_t rank);

// Returns `saved` with every file and slice listed, for programs that read a whole checkpoint. Reads the headers of all
// files, one open at a time. Returns an already listed checkpoint unchanged. If a file is damaged, throws, or passes
// the error to `on_damage` (if given) and omits the file.
SavedTensors with_every_slice(const SavedTensors& saved,
                              const std::function<void(const CheckpointError&)>& on_damage = {});

struct RankFileFields {
  int64_t rank = 0;
  uint64_t id = 0;  // id of the checkpoint
  int64_t block_bytes = 0;
  GeneratorStates rng;
};

// Returns a rank file's header, which includes its own checksum. Empty `checksums` give a header of the same length.
std::string format_rank_header(std::vector<SafetensorsEntry>& entries,
                               const std::map<std::string, std::string>& metadata, const RankFileFields& fields,
                               const std::map<std::string, std::vector<uint64_t>>& checksums, bool with_rng);

}  // namespace tessera::internal
