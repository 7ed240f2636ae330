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

// Functions that save and load sharded checkpoints. Each rank writes its own shards. Any wrapper on any number of ranks
// can load a checkpoint. FORMAT.md defines the file format; docs/checkpoint.md is the guide.
//
// Unless stated otherwise, these functions are collective over the model's communicator. They must be called on the
// communicator's thread, outside forward and backward. If one rank fails, all ranks throw an error that names that
// rank. Group, model and optimizer are then unchanged, and training can continue.
//
//   dir         path of the checkpoint, equal on all ranks: on a shared file system ("out/step-000200"), or "s3://...".
//               A save creates missing parent directories, and replaces an existing checkpoint.
//   model       any wrapper
//   optimizer   an optimizer of the wrapper's parameters, sharded or not, of a type in optim/state/optimizer_state.h
//   extra       JSON of rank 0 (step, position, ...); numbers must be finite, and binary data is not allowed
//
// Throws CheckpointError for files and CommError for a broken group. Throws std::invalid_argument for bad arguments,
// for objects or options that differ between ranks, and while the averages of a passed Ema or optimizer are swapped in.

// Writes a checkpoint, and blocks until the checkpoint is complete and durable. Until then, the directory keeps its old
// content. Saves the buffers of rank 0. If the group has an asynchronous save in flight, first waits for that save. If
// an earlier asynchronous save failed and wait() has not thrown its error, throws that error.
void save_checkpoint(const std::filesystem::path& dir, ModelShards& model, torch::optim::Optimizer& optimizer,
                     const nlohmann::json& extra = nlohmann::json::object(), const SaveOptions& options = {});
void save_checkpoint(const std::filesystem::path& dir, ModelShards& model,
                     const nlohmann::json& extra = nlohmann::json::object(), const SaveOptions& options = {});

// Saves a list of objects: save_checkpoint(dir, {model, optimizer, scheduler, ema, sampler}). The list may contain any
// Stateful object (include/tessera/checkpoint/stateful.h), with or without tensors.
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
  // Blocks until the save ends. An error that wait() has not thrown becomes a warning (errors.h), and the group's next
  // save throws it. During stack unwinding, does not wait for ranks that send no heartbeats. Not collective.
  ~PendingSave();

  // Returns whether this rank knows that the save has ended, successfully or not. Not collective. done() and wait() may
  // be called on any thread.
  bool done() const;

  // Blocks until this rank's state is copied. The state may then be modified. If SaveOptions::copy_in_background is
  // false, returns at once. Not collective. Does not throw.
  void copied() const;

  // Blocks until the checkpoint is complete. If the save failed, throws CheckpointError on all ranks, or
  // std::invalid_argument if a tensor changed before copied() returned. Not collective. A second call is a no-op.
  void wait();

 private:
  std::shared_ptr<internal::SaveJob> job_;
};

// Copies this rank's shards to host memory (pinned, for a GPU) and returns. Training can continue while the save runs
// in the background. The group's next asynchronous save reuses this host memory. The save completes even if wait() is
// never called. If a rank cannot write, or if one step of its save takes more than four times the group's timeout,
// wait() throws on all ranks. The error names the failed rank.
PendingSave save_checkpoint_async(const std::filesystem::path& dir, ModelShards& model,
                                  torch::optim::Optimizer& optimizer,
                                  const nlohmann::json& extra = nlohmann::json::object(),
                                  const SaveOptions& options = {});
PendingSave save_checkpoint_async(const std::filesystem::path& dir, ModelShards& model,
                                  const nlohmann::json& extra = nlohmann::json::object(),
                                  const SaveOptions& options = {});

// Saves a list of objects in the background: see the overload of save_checkpoint() for a TrainingState.
PendingSave save_checkpoint_async(const std::filesystem::path& dir, const TrainingState& state,
                                  const nlohmann::json& extra = nlohmann::json::object(),
                                  const SaveOptions& options = {});

// Loads a checkpoint that any wrapper saved on any number of ranks. Returns the checkpoint's `extra`. Each rank reads
// and verifies the blocks of its shards. No rank changes its state before all ranks have read their blocks. Sets
// parameters, buffers, optimizer state, hyper-parameters and random generators. One error lists all differences in
// names, shapes, dtypes and optimizer. If no optimizer is passed, ignores saved optimizer state; otherwise such state
// is required. First waits for an asynchronous save in flight, without throwing its error.
nlohmann::json load_checkpoint(const std::filesystem::path& dir, ModelShards& model, torch::optim::Optimizer& optimizer,
                               const LoadOptions& options = {});
nlohmann::json load_checkpoint(const std::filesystem::path& dir, ModelShards& model, const LoadOptions& options = {});

// Loads a list of objects, each of which the checkpoint must contain. The list may omit other saved objects.
nlohmann::json load_checkpoint(const std::filesystem::path& dir, const TrainingState& state,
                               const LoadOptions& options = {});

// The result of load_newest_checkpoint(). `damaged` has the error of each skipped checkpoint: first those of
// checkpoints of unknown age, then the others from newest to oldest.
struct LoadedCheckpoint {
  std::filesystem::path path;
  nlohmann::json extra;
  std::vector<std::string> damaged;
};

// Loads the newest complete and undamaged checkpoint in a folder. Skips and reports damaged checkpoints. Always skips a
// checkpoint with a damaged manifest, because its age is unknown. Collective. First waits for a save in flight.
//
// Returns nullopt if the folder has no checkpoint. Throws CheckpointError if all are damaged, or if the folder is a
// checkpoint, a file or a broken link. Throws CheckpointMismatch like load_checkpoint(). An error that does not prove
// damage is thrown, because loading an older checkpoint instead would lose progress. Such errors are StorageUnavailable
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

// A lock that gives one job exclusive use of a local folder, such as its output folder. The job's rank 0 holds the
// lock. The lock is a file ".tessera.lock", which contains the holder's name and is never removed. Not collective.
class FolderLock {
 public:
  // Creates the folder if missing. If another job holds the lock, throws CheckpointError with folder, process and host.
  // Throws std::invalid_argument for an empty or remote path. If the file system has no locks, the name of a holder in
  // the file is the lock. Ignores the name of a dead process of this host; after the death of a process of another
  // host, the file must be removed by hand.
  explicit FolderLock(const std::filesystem::path& folder);
  ~FolderLock();
  FolderLock(FolderLock&& other) noexcept;
  FolderLock& operator=(FolderLock&&) = delete;

 private:
  std::filesystem::path file_;
  std::unique_ptr<internal::FileLock> lock_;
};

}  // namespace tessera
