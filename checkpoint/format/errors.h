#pragma once

#include <stdexcept>

namespace tessera {

// A checkpoint cannot be written or read, or does not fit the model. what() names the directory or file, the tensor and
// the reason; from a collective function also the rank.
class CheckpointError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An undamaged checkpoint that does not fit the model, the optimizer or the options.
class CheckpointMismatch : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

// The storage could not provide a file now: no answer after all attempts, a refusal, no permission, too many open
// files, a disk that cannot be read. Does not mean that the checkpoint is damaged.
class StorageUnavailable : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

}  // namespace tessera
