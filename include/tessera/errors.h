#pragma once

#include <stdexcept>
#include <string>

namespace tessera {

// A collective that failed: a peer died, did not come in time, or came with another operation.
// what() names the operation, the unit it was for and the rank; the group is of no use afterwards.
// Wrong arguments throw std::invalid_argument instead, before anything is sent.
class CommError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

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

// An archive of torch.export that cannot be read, or asks for what is not supported or not allowed. what() names the
// file and, where it is about a node of the graph, the node, its operator and the line of Python that it comes from.
class ExportedError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace tessera
