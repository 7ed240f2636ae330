#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <tessera/checkpoint/full_file.h>
#include "checkpoint/format/shard_writer.h"

namespace tessera::internal {

// Operations on checkpoints without a model or ranks, for the `tessera` command. All verify the data that they read.
// They throw CheckpointError (files) or std::invalid_argument (arguments).

// Writes a checkpoint's parameters and buffers, and with `state` the optimizer's tensors, to full files outside the
// checkpoint. Holds one tensor in memory at a time.
void consolidate_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to, bool state,
                            const SaveFullOptions& options = {}, const Progress& progress = {});

// Rewrites the checkpoint for `ranks` ranks. Each rank gets an even part of every large tensor; small tensors stay
// whole. Holds one slice in memory at a time. Keeps generator states only if the number of ranks is unchanged.
void reshard_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to, int ranks,
                        const Progress& progress = {});

// Compares all files of a checkpoint with its manifest: sizes, headers, the position of every slice, every checksum,
// surplus files. Returns one line for each problem, or an empty list if the checkpoint is intact. Throws
// CheckpointError if the manifest is damaged or missing.
std::vector<std::string> verify_checkpoint(const std::filesystem::path& directory, const Progress& progress = {});

// The difference of two tensors with equal name, shape and dtype, or a reason why they cannot be compared.
struct TensorDifference {
  std::string name;
  std::string reason;           // "only in <a>", "shape [2] and [3]", ... ; empty: values differ
  int64_t different_numel = 0;  // number of elements that differ
  double max_difference = 0;    // largest difference of two values; NaN if a value is NaN
};

struct DiffOptions {
  double tolerance = 0;          // largest difference that counts as equal; 0: compares bits, so that 0 differs from -0
  bool only_parameters = false;  // ignores buffers, optimizer, Stateful objects and `extra`
};

// Compares two checkpoints or full files. Returns an entry for each tensor that differs, and one with a reason for
// differing optimizers, Stateful values or `extra`. Holds a few MiB of each tensor in memory.
std::vector<TensorDifference> diff_checkpoints(const std::filesystem::path& a, const std::filesystem::path& b,
                                               const DiffOptions& options = {}, const Progress& progress = {});

// Lists the tensors of a checkpoint or of full files.
SavedTensors find_tensors(const std::filesystem::path& path);

}  // namespace tessera::internal
