#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace tessera {

// How a checkpoint is written. Must be the same on all ranks.
struct SaveOptions {
  // Number of newest complete checkpoints to keep in the directory's parent after a save; 0: all. The parent must then
  // hold the checkpoints of one run only. Files of your own in a removed checkpoint are kept.
  int keep_last = 0;

  // Bytes covered by one checksum: the smallest read of a rank that needs part of a slice. Must be a multiple of 16, at
  // most 1 GiB.
  int64_t block_bytes = int64_t{1} << 20;

  // For save_checkpoint_async() only: a thread copies parameters and optimizer state to the host during the next
  // forward and backward. PendingSave::copied() must return before optimizer.step() modifies them; an earlier write
  // fails the save, with the tensor's name. Buffers, Stateful objects and optimizers whose writes autograd does not
  // count (torch's SGD, LBFGS, your own) are copied before the call returns.
  bool copy_in_background = false;

  // Saves the random generators' states too. Ranks that are threads of one process share the CPU generator; each saves
  // the state that it finds.
  bool rng = true;
};

// Differences that a load with strict = false skipped. The same on all ranks.
struct LoadReport {
  std::vector<std::string> missing;     // names that the checkpoint lacks
  std::vector<std::string> unexpected;  // names of tensors and states that the model lacks
  std::vector<std::string> optimizer;   // differences of the optimizer, as sentences
};

// How a checkpoint is loaded. Must be the same on all ranks, except for the pointers.
struct LoadOptions {
  // true: model and checkpoint must have equal names. false: skips names that only one of them has, with their
  // optimizer state. If the numbers of optimizer groups differ, also skips all hyper-parameters. `report` lists the
  // skipped ones. Shapes must agree either way.
  bool strict = true;

  // If not null, receives the skipped differences; empty if `strict`.
  LoadReport* report = nullptr;

  // Maps a parameter's or buffer's name in the checkpoint to its name in the model; "" skips the tensor. Optimizer
  // state, averages and other tensors named after a parameter follow it. Not set: names are equal.
  std::function<std::string(const std::string& saved)> rename{};

  // Returns whether the checkpoint stores this tensor transposed (Hugging Face's Conv1D). It must have two dimensions.
  // Applies to its optimizer state and averages too. Not set: none is transposed.
  std::function<bool(const std::string& saved)> transposed{};

  // true: converts floating-point tensors of another dtype to the model's, rounding to nearest; also optimizer state
  // that has its parameter's old dtype. false: another dtype is an error.
  bool convert_dtypes = false;

  // Restores the random generators, if the checkpoint has their states and was saved by the current number of ranks.
  bool rng = true;

  // If not null, receives the bytes that this rank read from data files.
  int64_t* bytes_read = nullptr;
};

}  // namespace tessera
