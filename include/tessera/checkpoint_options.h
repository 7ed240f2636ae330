#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace tessera {

// How a checkpoint is written. The same on all ranks.
struct SaveOptions {
  // After a save, only this many of the complete checkpoints in the directory's parent stay, the newest; 0: all. The
  // parent is then taken to hold one run's checkpoints alone. Files of your own in one that is removed stay.
  int keep_last = 0;

  // How many bytes one checksum covers: what a rank that needs a part of a slice reads at least. A multiple of 16, at
  // most 1 GiB.
  int64_t block_bytes = int64_t{1} << 20;

  // save_checkpoint_async() alone: all parameters and optimizer state are copied to the host on a thread, while the
  // next forward and backward run, and PendingSave::copied() has to return before anything writes to them: before
  // optimizer.step(). What was written too early is an error of the save, which names it. Buffers, what is beside the
  // model, and all of an optimizer whose writes autograd does not count (torch's SGD, LBFGS, one of your own) are
  // copied before the call returns.
  bool copy_in_background = false;

  // The states of the random generators too. Where ranks are threads of one process they share the CPU's, and it is
  // saved as each finds it.
  bool rng = true;
};

// What a load with strict = false left as it was. The same on all ranks.
struct LoadReport {
  std::vector<std::string> missing;     // the model's names that the checkpoint does not have
  std::vector<std::string> unexpected;  // the checkpoint's names, also of states, that found no place
  std::vector<std::string> optimizer;   // of the optimizer: sentences
};

// What a checkpoint has to fit, and what is taken from it. The same on all ranks, but for the pointers.
struct LoadOptions {
  // true: the names of the model and of the checkpoint must be the same. false: what only one of them has is left as
  // it is, its optimizer state too, and listed in `report`; so are all hyper-parameters where the optimizers' groups
  // are not equally many. Shapes must agree either way.
  bool strict = true;

  // If not null, gets what was left as it was: nothing if `strict`.
  LoadReport* report = nullptr;

  // The model's name for a name of the checkpoint: of a parameter or buffer; the optimizer's state, averages, and what
  // else beside the model has a parameter's name, follow the parameter. "" leaves the tensor out. Not set: the same
  // name.
  std::function<std::string(const std::string& saved)> rename;

  // Whether the tensor of a checkpoint's name, which must have two dimensions, is stored as the transposed of the
  // model's (Hugging Face's Conv1D). Its optimizer state and averages are taken to be so too. Not set: none is.
  std::function<bool(const std::string& saved)> transposed;

  // Floating-point tensors of another dtype than the model's are converted, rounding to nearest; an optimizer's state
  // that had its parameter's dtype gets the model's. false: another dtype is an error.
  bool convert_dtypes = false;

  // Restores the random generators, if the checkpoint has their states and was saved by as many ranks as load it.
  bool rng = true;

  // If not null, gets the number of bytes that this rank read from data files.
  int64_t* bytes_read = nullptr;
};

}  // namespace tessera
