#pragma once

#include <stdexcept>
#include <string>

namespace tessera {

// A collective failed: a peer died, did not arrive in time, or called another operation. what() names the operation,
// its unit and the rank; the group is broken afterwards. Wrong arguments throw std::invalid_argument instead, before
// any bytes are sent.
class CommError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

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

// An archive of torch.export cannot be read, or needs an operator or feature that is not supported or not allowed.
// what() names the file; for an error in the graph also the node, its operator and its line of Python.
class ExportedError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace tessera
