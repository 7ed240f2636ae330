#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace tessera {

// Options of a save. Must be equal on all ranks.
struct SaveOptions {
  // Number of newest complete checkpoints that a save keeps in the directory's parent; 0: all. If above 0, the parent
  // must hold the checkpoints of one run only. Also removes damaged ones. Keeps all files that no save wrote.
  int keep_last = 0;

  // Number of bytes that one checksum covers. A rank reads whole blocks of this size, even for a smaller part. Must be
  // a multiple of 16, at most 1 GiB.
  int64_t block_bytes = int64_t{1} << 20;

  // For save_checkpoint_async() only. true: a thread copies parameters and optimizer state to the host during the next
  // forward and backward. optimizer.step() must wait until PendingSave::copied() returns. If a tensor changes earlier,
  // the save fails with an error that names it. The call itself still copies buffers, Stateful objects and tensors on
  // disk. No effect unless all optimizers, at least one, are torch's Adam, AdamW, RMSprop or Adagrad, or Tessera's Adam
  // or AdamW.
  bool copy_in_background = false;

  // true: also saves the random generators' states. Ranks that are threads of one process share the CPU generator, and
  // each of them saves the current state of that generator.
  bool rng = true;
};

// Differences that a load with strict = false skipped. Equal on all ranks.
struct LoadReport {
  std::vector<std::string> missing;     // names of tensors and states that the checkpoint lacks
  std::vector<std::string> unexpected;  // names of tensors and states in the checkpoint that the model lacks
  std::vector<std::string> optimizer;   // differences in the optimizer's groups, as sentences
};

// Options of a load. Must be equal on all ranks, except for the pointers.
struct LoadOptions {
  // true: model and checkpoint must have equal names. false: skips names that only the model or only the checkpoint
  // has, with their optimizer state. If the numbers of optimizer groups differ, also skips all hyper-parameters.
  // `report` lists skipped names. In either case, shapes must be equal.
  bool strict = true;

  // If not null, receives the skipped differences. If `strict` is true, the report is empty.
  LoadReport* report = nullptr;

  // Maps the checkpoint's name of a parameter or buffer to the model's name; "" skips the tensor. Also applies to
  // optimizer state, averages and other tensors that are named after a parameter. Not set: names are equal.
  std::function<std::string(const std::string& saved)> rename{};

  // Returns whether the checkpoint stores this tensor transposed (Hugging Face's Conv1D). Such a tensor must have two
  // dimensions. Its optimizer state and averages are transposed, too. Not set: no tensor is transposed.
  std::function<bool(const std::string& saved)> transposed{};

  // true: converts floating-point tensors to the model's dtype, rounding to nearest. Also converts optimizer state that
  // has the saved dtype of its parameter. false: a difference in dtype is an error.
  bool convert_dtypes = false;

  // true: restores the random generators if the checkpoint has their states and was saved by the same number of ranks.
  bool rng = true;

  // If not null, receives the number of bytes that this rank read from data files.
  int64_t* bytes_read = nullptr;
};

}  // namespace tessera
