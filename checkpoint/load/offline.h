#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <tessera/full_file.h>
#include "checkpoint/format/shard_writer.h"

namespace tessera::internal {

// What can be done to checkpoints without a model and without ranks: the `tessera` command's work.
// All throw CheckpointError (files) or std::invalid_argument (arguments); data is verified as it is read.

// Writes a checkpoint's parameters and buffers, with `state` the optimizer's tensors too, to full files, elsewhere than
// in the checkpoint. Memory of one tensor.
void consolidate_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to, bool state,
                            const SaveFullOptions& options = {}, const Progress& progress = {});

// Writes the checkpoint anew as `ranks` ranks would, each an even part of every tensor (small ones whole). Memory of
// one slice. Random generators' states stay only if the number of ranks does.
void reshard_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to, int ranks,
                        const Progress& progress = {});

// Reads all of a checkpoint and compares it with its manifest: sizes, headers, the place of every slice, every
// checksum, files too many. Returns what is wrong, a line each; none: it is sound. Throws CheckpointError if the
// manifest itself is damaged or not there.
std::vector<std::string> verify_checkpoint(const std::filesystem::path& directory, const Progress& progress = {});

// How two tensors of one name, shape and dtype differ.
struct TensorDifference {
  std::string name;
  std::string reason;           // "only in <a>", "shape [2] and [3]", ... ; empty: values differ
  int64_t different_numel = 0;  // elements that differ
  double max_difference = 0;    // of their values; NaN if one is not a number
};

struct DiffOptions {
  double tolerance = 0;          // values that are as close do not differ; 0: bits count, so that 0 is not -0
  bool only_parameters = false;  // and no buffers, optimizer, what is beside, `extra`
};

// What differs between two checkpoints (or full files), tensor by tensor, in order of names; then optimizer and
// `extra`, as entries with a reason. Memory of one block of each, a few MiB.
std::vector<TensorDifference> diff_checkpoints(const std::filesystem::path& a, const std::filesystem::path& b,
                                               const DiffOptions& options = {}, const Progress& progress = {});

// A checkpoint's tensors, or those of full files.
SavedTensors find_tensors(const std::filesystem::path& path);

}  // namespace tessera::internal
