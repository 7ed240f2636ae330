#pragma once

#include <functional>
#include <stdexcept>
#include <string>

namespace tessera {

// Thrown if a collective failed: a peer died, did not join in time, or called a different operation. what() names the
// operation, its unit and the rank. The group is broken afterwards. Invalid arguments throw std::invalid_argument
// instead, before any bytes are sent.
class CommError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Thrown if a checkpoint cannot be written or read, or does not fit the model. what() names the directory or file, the
// tensor and the reason. If a collective function throws, what() also names the rank.
class CheckpointError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Thrown for an undamaged checkpoint that does not fit the model, the optimizer or the options.
class CheckpointMismatch : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

// Thrown if the storage could not provide a file now: no answer after all attempts, a refusal, no permission, too many
// open files, or an unreadable disk. Does not mean that the checkpoint is damaged.
class StorageUnavailable : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

// Thrown if an archive of torch.export cannot be read, or needs an operator or feature that is not supported or
// allowed. what() names the file and, for an error in the graph, the node with its operator and line of Python.
class ExportedError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Sets the function that receives Tessera's warnings, each as one line of text; a null `handler` restores the default.
// Thread-safe. By default, libtorch's warning handler receives a warning if the program has replaced that handler on
// the calling thread. Otherwise Tessera writes the warning to stderr, but only while a group of init(), run_ranks() or
// Elastic with ProcessSetup::print_warnings exists. Without such a group, it writes nothing to stdout and stderr. Any
// thread may call `handler`, even while the process ends. `handler` must not throw.
void set_warning_handler(std::function<void(const std::string& text)> handler);

}  // namespace tessera
