#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tessera/checkpoint/full_file.h"
#include "tessera/checkpoint/shard_writer.h"

namespace tessera {

// What can be done to checkpoints without a model and without ranks: the `tessera` command's work.
// All throw CheckpointError (files) or std::invalid_argument (arguments); data is verified as it is read.

// Writes a checkpoint's parameters and buffers, with `state` the optimizer's tensors too, to full
// files. Memory of one tensor.
void consolidate_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to, bool state,
                            const SaveFullOptions& options = {}, const Progress& progress = {});

// Writes the checkpoint anew as `ranks` ranks would, each an even part of every tensor (small ones
// whole). Memory of one slice. Random generators' states stay only if the number of ranks does.
void reshard_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to, int ranks,
                        const Progress& progress = {});

// How two tensors of one name, shape and dtype differ.
struct TensorDifference {
  std::string name;
  std::string reason;           // "only in <a>", "shape [2] and [3]", ... ; empty: values differ
  int64_t different_numel = 0;  // elements whose bits differ
  double max_difference = 0;    // of their values; NaN if one is not a number
};

// What differs between two checkpoints (or full files), tensor by tensor, in order of names; then
// optimizer and `extra`, as entries with a reason. Memory of one tensor of each.
std::vector<TensorDifference> diff_checkpoints(const std::filesystem::path& a, const std::filesystem::path& b,
                                               const Progress& progress = {});

// A checkpoint's tensors, or those of full files.
SavedTensors find_tensors(const std::filesystem::path& path);

// All bytes of these tensors' data.
int64_t total_bytes(const SavedTensors& saved);

}  // namespace tessera
