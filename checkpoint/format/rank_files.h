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

// Computes which rank wrote which part of a tensor, and into which file (FORMAT.md, "Rank files"). The manifest lists
// the elements of each rank; rules and the headers of the rank's files give the rest.

std::string rank_file_name(int64_t rank, size_t number);  // "rank-00042-0.safetensors"

// Returns the strides that the tensor had in memory when it was saved.
std::vector<int64_t> memory_strides(const SavedTensor& tensor);

// Returns the boxes of a range of elements, in memory order, as a rank stores them: box k is in file k.
std::vector<Box> boxes_by_file(const SavedTensor& tensor, Range held);

// Visits each rank that holds a part of `range`, with the whole run of elements that it holds there, which may exceed
// `range`. For an empty tensor, visits one rank with an empty range.
void for_each_holder(const SavedTensor& tensor, Range range,
                     const std::function<void(int64_t rank, Range held)>& visit);
// Returns the smallest range in memory order that contains the box; empty if the box is.
Range range_of_box(const SavedTensor& tensor, const Box& box);

// Sorts runs by `begin` and merges adjacent ones. Keeps one run of an empty tensor.
void join_runs(std::vector<RankRun>& runs);

// The checked header of one file of a rank.
struct RankFile {
  std::map<std::string, SafetensorsEntry> entries;
  std::map<std::string, std::vector<uint64_t>> checksums;  // of each entry's blocks
  GeneratorStates rng;                                     // in file 0, if saved
  int64_t header_bytes = 0;

  // Returns the slice with this box. Throws CheckpointError if the file lacks it or its fields differ.
  SavedSlice slice(const std::string& name, const SavedTensor& tensor, const Box& box, int64_t block_bytes,
                   const std::string& where) const;
};
// Throws CheckpointError for damage, and for a file of another checkpoint, rank or number.
RankFile read_rank_file(const InputFile& file, const SavedTensors& saved, int64_t rank);

// Returns the generator states that a rank saved, or none.
GeneratorStates generators_of(const Manifest& manifest, int64_t rank);

// Returns `saved` with every file and slice listed, for programs that read a whole checkpoint. Reads the headers of all
// files, one open at a time. Returns an already listed checkpoint unchanged. If on_damage is given, passes the error of
// a damaged file to it and omits the file.
SavedTensors with_every_slice(const SavedTensors& saved,
                              const std::function<void(const CheckpointError&)>& on_damage = {});

struct RankFileFields {
  int64_t rank = 0;
  uint64_t id = 0;  // the checkpoint's
  int64_t block_bytes = 0;
  GeneratorStates rng;
};

// Returns the header's text with the rank's fields and its own checksum. Its length does not depend on the checksums.
std::string format_rank_header(std::vector<SafetensorsEntry>& entries,
                               const std::map<std::string, std::string>& metadata, const RankFileFields& fields,
                               const std::map<std::string, std::vector<uint64_t>>& checksums, bool with_rng);

}  // namespace tessera::internal
