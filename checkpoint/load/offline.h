#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <tessera/checkpoint/full_file.h>
#include "checkpoint/format/shard_writer.h"

namespace tessera::internal {

// Operations on checkpoints for the `tessera` command, which need no model and no ranks. They verify all data that has
// checksums. They throw CheckpointError for bad files, and std::invalid_argument for bad arguments.

// Writes a checkpoint's parameters and buffers to full files, as save_full() does, outside the checkpoint. If `state`
// is true, also writes the tensors of optimizers and Stateful objects. Holds one tensor in memory at a time.
void consolidate_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to, bool state,
                            const SaveFullOptions& options = {}, const Progress& progress = {});

// Rewrites a checkpoint for `ranks` ranks. Divides every large tensor evenly among the ranks, and stores each small
// tensor on one rank. Holds one slice in memory at a time. Keeps generator states only if the world size is unchanged.
void reshard_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to, int ranks,
                        const Progress& progress = {});

// Compares the files of a checkpoint with its manifest. Checks file sizes and headers, and the position and checksums
// of every slice. Also looks for surplus safetensors files. Returns one line for each problem: none for an intact
// checkpoint. Throws CheckpointError if the manifest is damaged or missing, or if the storage is unavailable.
std::vector<std::string> verify_checkpoint(const std::filesystem::path& directory, const Progress& progress = {});

// The difference of two tensors with equal name, shape and dtype, or the reason why the tensors cannot be compared.
struct TensorDifference {
  std::string name;
  std::string reason;           // "only in <a>", "shape [2] and [3]", ...; empty if values were compared
  int64_t different_numel = 0;  // number of elements that differ
  double max_difference = 0;    // largest absolute difference; NaN if a differing element is NaN
};

struct DiffOptions {
  double tolerance = 0;          // largest difference that counts as equal; if 0, compares bits, so 0 differs from -0
  bool only_parameters = false;  // if true, ignores buffers, optimizers, Stateful objects and `extra`
};

// Compares two checkpoints or full files. Returns an entry for each tensor that differs. Also returns an entry with a
// reason if optimizers, Stateful values or `extra` differ. Holds a few MiB of each tensor in memory.
std::vector<TensorDifference> diff_checkpoints(const std::filesystem::path& a, const std::filesystem::path& b,
                                               const DiffOptions& options = {}, const Progress& progress = {});

// Lists the tensors of a checkpoint or of full files, with their positions in files.
SavedTensors find_tensors(const std::filesystem::path& path);

}  // namespace tessera::internal
