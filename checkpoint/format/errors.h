#pragma once

#include <stdexcept>

namespace tessera {

// A checkpoint that cannot be written or read, or that does not fit the model. what() names the
// directory or file, the tensor and the reason, and, from a collective function, the rank.
class CheckpointError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A sound checkpoint of something else: it does not fit the model, the optimizer or the options.
class CheckpointMismatch : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

// What was asked for could not be had, here and now: a storage elsewhere that gave no answer, after all attempts, or
// refused one; a file that may not be opened, too many that are, a disk that does not read. Says nothing of the
// checkpoint.
class StorageUnavailable : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

}  // namespace tessera
