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

// What each rank wrote and where it lies, by rule (FORMAT.md, "Rank files"): a manifest says which elements of a tensor
// are which rank's, and the rest follows, or stands in the rank's own files.

std::string rank_file_name(int64_t rank, size_t number);  // "rank-00042-0.safetensors"

// The strides of a saved tensor's elements in memory, where it was saved.
std::vector<int64_t> memory_strides(const SavedTensor& tensor);

// The boxes of a range of elements, in the order of memory, as a rank's files hold them: box k is in file k.
std::vector<Box> boxes_by_file(const SavedTensor& tensor, Range held);

// Visits the ranks that hold some of a range of a tensor's elements (all, for a tensor without any), and what they
// hold.
void for_each_holder(const SavedTensor& tensor, Range range,
                     const std::function<void(int64_t rank, Range held)>& visit);
// The smallest range in the order of memory that has all elements of the box; empty if it has none.
Range range_of_box(const SavedTensor& tensor, const Box& box);

// Sorts runs by `begin`, and makes one of those that are one. Of a tensor without elements, one run stays.
void join_runs(std::vector<RankRun>& runs);

// The header of one file of a rank, read and checked.
struct RankFile {
  std::map<std::string, SafetensorsEntry> entries;
  std::map<std::string, std::vector<uint64_t>> checksums;  // of each entry's blocks
  GeneratorStates rng;                                     // in file 0, if they were saved
  int64_t header_bytes = 0;

  // The slice of a box that has to be here. Throws CheckpointError if it is not, or is something else.
  SavedSlice slice(const std::string& name, const SavedTensor& tensor, const Box& box, int64_t block_bytes,
                   const std::string& where) const;
};
// Throws CheckpointError for damage, and for a file of another checkpoint, rank or number.
RankFile read_rank_file(const InputFile& file, const SavedTensors& saved, int64_t rank);

// The generators' states that a rank saved; none if there are none.
GeneratorStates generators_of(const Manifest& manifest, int64_t rank);

// The same tensors with every file and slice listed, from the headers of all files, one open at a time: for work that
// looks at all of a checkpoint. What is listed already is returned as it is. A file that is damaged is left out where
// `on_damage` takes its error.
SavedTensors with_every_slice(const SavedTensors& saved,
                              const std::function<void(const CheckpointError&)>& on_damage = {});

// What a rank's files are written with.
struct RankFileFields {
  int64_t rank = 0;
  uint64_t id = 0;  // the checkpoint's
  int64_t block_bytes = 0;
  GeneratorStates rng;
};

// The header's text with the rank's fields, sealed; as long whatever the checksums are.
std::string format_rank_header(std::vector<SafetensorsEntry>& entries,
                               const std::map<std::string, std::string>& metadata, const RankFileFields& fields,
                               const std::map<std::string, std::vector<uint64_t>>& checksums, bool with_rng);

}  // namespace tessera::internal
