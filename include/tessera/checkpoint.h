#pragma once

#include <torch/optim/optimizer.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/checkpoint/options.h>
#include <tessera/checkpoint/training_state.h>
#include <tessera/errors.h>
#include <tessera/model/model_shards.h>

namespace tessera {

namespace internal {
class FileLock;
}

// Saves and loads sharded checkpoints: each rank writes its own shards, and any wrapper on any number of ranks can load
// them. FORMAT.md defines the bytes; docs/checkpoint.md is the guide.
//
// Unless stated otherwise, these functions are collective over the model's communicator. They must be called on the
// communicator's thread, outside forward and backward. If one rank fails, all ranks throw an error that names that
// rank. Group, model and optimizer are then unchanged, and training can continue.
//
//   dir         path of the checkpoint ("out/step-000200"), equal on all ranks, on a shared file system. Creates its
//               parents, and replaces an existing checkpoint.
//   model       any wrapper
//   optimizer   any type known to optim/state/optimizer_state.h, over the wrapper's parameters; sharded or not
//   extra       the caller's own values (step, position, ...), finite numbers without binary data; rank 0's is saved
//
// Throws CheckpointError for files and CommError for a broken group. Throws std::invalid_argument for bad arguments,
// and while the averages of a given Ema or optimizer are swapped in.

// Writes a checkpoint, and blocks until the checkpoint is complete and durable. Until then, the directory keeps its old
// content. Saves the buffers of rank 0. First waits for the group's asynchronous save in flight. If an asynchronous
// save has failed and wait() has not thrown its error, throws that error.
void save_checkpoint(const std::filesystem::path& dir, ModelShards& model, torch::optim::Optimizer& optimizer,
                     const nlohmann::json& extra = nlohmann::json::object(), const SaveOptions& options = {});
void save_checkpoint(const std::filesystem::path& dir, ModelShards& model,
                     const nlohmann::json& extra = nlohmann::json::object(), const SaveOptions& options = {});

// Saves a list of objects: save_checkpoint(dir, {model, optimizer, scheduler, ema, sampler}). The list may have any
// Stateful (include/tessera/checkpoint/stateful.h), with or without tensors.
void save_checkpoint(const std::filesystem::path& dir, const TrainingState& state,
                     const nlohmann::json& extra = nlohmann::json::object(), const SaveOptions& options = {});

namespace internal {
class SaveJob;
}

// Handle of a save that runs in the background. Move-only.
class [[nodiscard]] PendingSave {
 public:
  // For save_checkpoint_async() only.
  explicit PendingSave(std::shared_ptr<internal::SaveJob> job) : job_(std::move(job)) {}
  PendingSave(PendingSave&&) noexcept = default;
  PendingSave& operator=(PendingSave&&) noexcept = default;
  // Blocks until the checkpoint is complete or has failed. An error becomes a warning (errors.h), and the group's next
  // save throws it. During stack unwinding, stops waiting for a rank that sends no heartbeats. Not collective.
  ~PendingSave();

  // Returns whether this rank knows that the save has ended, successfully or not. Not collective. done() and wait() may
  // be called on any thread.
  bool done() const;

  // Blocks until this rank's state is copied. The state may then be modified. Without SaveOptions::copy_in_background,
  // returns at once. Not collective. Does not throw.
  void copied() const;

  // Blocks until the checkpoint is complete. If the save failed, throws CheckpointError on all ranks. Not collective. A
  // second call returns at once.
  void wait();

 private:
  std::shared_ptr<internal::SaveJob> job_;
};

// Copies this rank's shards to host memory (pinned, for a GPU) and returns. Training can continue while the save runs
// in the background. The group's next asynchronous save reuses that memory. The save completes even if wait() is never
// called. If a rank cannot write, or one step of its save takes four times the group's timeout, wait() throws on all
// ranks. The error names that rank.
PendingSave save_checkpoint_async(const std::filesystem::path& dir, ModelShards& model,
                                  torch::optim::Optimizer& optimizer,
                                  const nlohmann::json& extra = nlohmann::json::object(),
                                  const SaveOptions& options = {});
PendingSave save_checkpoint_async(const std::filesystem::path& dir, ModelShards& model,
                                  const nlohmann::json& extra = nlohmann::json::object(),
                                  const SaveOptions& options = {});

// Like save_checkpoint() of a TrainingState.
PendingSave save_checkpoint_async(const std::filesystem::path& dir, const TrainingState& state,
                                  const nlohmann::json& extra = nlohmann::json::object(),
                                  const SaveOptions& options = {});

// Loads a checkpoint that any wrapper saved on any number of ranks. Returns its `extra`. Each rank reads and verifies
// the blocks of its shards; no rank changes its state before all ranks have read. Sets parameters, buffers, optimizer
// state, hyper-parameters and random generators. One error lists all mismatches: missing, unexpected, shape, dtype,
// optimizer. A checkpoint with optimizer state can be loaded without an optimizer, but not the reverse. First waits for
// the group's asynchronous save in flight, without throwing its error.
nlohmann::json load_checkpoint(const std::filesystem::path& dir, ModelShards& model, torch::optim::Optimizer& optimizer,
                               const LoadOptions& options = {});
nlohmann::json load_checkpoint(const std::filesystem::path& dir, ModelShards& model, const LoadOptions& options = {});

// The list may omit Stateful objects of the checkpoint, but must not contain objects that the checkpoint lacks.
nlohmann::json load_checkpoint(const std::filesystem::path& dir, const TrainingState& state,
                               const LoadOptions& options = {});

// The result of load_newest_checkpoint(). `damaged` has the errors of skipped checkpoints: first checkpoints of unknown
// age, then the others from newest to oldest.
struct LoadedCheckpoint {
  std::filesystem::path path;
  nlohmann::json extra;
  std::vector<std::string> damaged;
};

// Loads the newest complete and undamaged checkpoint in a folder. Skips and reports damaged checkpoints. A checkpoint
// with a damaged manifest has no known age, and is always skipped. Collective. Waits like load_checkpoint().
//
// Returns nullopt if the folder has no checkpoint. Throws CheckpointError if all are damaged, or if the folder is a
// checkpoint, a file or a broken link. Throws CheckpointMismatch like load_checkpoint(). After an error that proves no
// damage, throws instead of loading an older checkpoint, which would lose progress. Such errors are StorageUnavailable
// (no answer, no permission, too many open files, an unreadable disk), and CheckpointError for lack of memory.
std::optional<LoadedCheckpoint> load_newest_checkpoint(const std::filesystem::path& folder, const TrainingState& state,
                                                       const LoadOptions& options = {});
std::optional<LoadedCheckpoint> load_newest_checkpoint(const std::filesystem::path& folder, ModelShards& model,
                                                       torch::optim::Optimizer& optimizer,
                                                       const LoadOptions& options = {});

// Returns the newest complete checkpoint among the entries of a folder, or nullopt. Prefers a checkpoint with a damaged
// manifest, so that a load reports the damage. Throws CheckpointError if the folder is itself a checkpoint, a file or a
// broken link. Not collective: must be called on rank 0 only, or while no save is in flight.
std::optional<std::filesystem::path> latest_checkpoint(const std::filesystem::path& folder);

// A lock that gives one job exclusive use of a folder, such as its output folder. The job's rank 0 holds the lock: a
// file ".tessera.lock", which names its holder and is never removed. Not collective.
class FolderLock {
 public:
  // Creates the folder if it is missing. If another job holds the lock, throws CheckpointError with process, host and
  // file. On a file system without locks, the text of the file names the holder. If the holder is a dead process of
  // this host, takes over the lock. The file of any other dead holder must be removed by hand.
  explicit FolderLock(const std::filesystem::path& folder);
  ~FolderLock();
  FolderLock(FolderLock&& other) noexcept;
  FolderLock& operator=(FolderLock&&) = delete;

 private:
  std::filesystem::path file_;
  std::unique_ptr<internal::FileLock> lock_;
};

}  // namespace tessera
