#pragma once

#include <torch/optim/optimizer.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/checkpoint_options.h>
#include <tessera/errors.h>
#include <tessera/model_shards.h>
#include <tessera/training_state.h>

namespace tessera {

// Sharded checkpoints: each rank writes its own shards, and any wrapper on any number of ranks loads them. FORMAT.md
// has the bytes; docs/checkpoint.md the use. All functions are collective over the model's communicator unless said
// otherwise, and called by the thread that uses it, outside forward and backward. An error on one rank is an error on
// all, which names the rank; the group, the model and the optimizer are then as they were, and training can go on.
//
//   dir         the checkpoint itself ("out/step-000200"), the same on all ranks, on a file system that all of them
//               see. Its parents are made. A checkpoint that is there is replaced.
//   model       any wrapper
//   optimizer   any that optim/state/optimizer_state.h knows, over the wrapper's parameters; sharded or not
//   extra       the caller's own, finite numbers, nothing binary, rank 0's is kept: step, position, ...; {} if null
//
// Throws CheckpointError for files, std::invalid_argument for arguments and while averages are swapped in whose Ema, or
// optimizer, is given; CommError for a broken group.

// Writes a checkpoint and returns when it is complete and on the disk; killed before, the directory is what it was.
// Buffers are rank 0's. Waits first for an asynchronous save of the same group that is under way, and throws the error
// of one that failed and was not waited for.
void save_checkpoint(const std::filesystem::path& dir, ModelShards& model, torch::optim::Optimizer& optimizer,
                     const nlohmann::json& extra = nlohmann::json::object(), const SaveOptions& options = {});
void save_checkpoint(const std::filesystem::path& dir, ModelShards& model,
                     const nlohmann::json& extra = nlohmann::json::object(), const SaveOptions& options = {});

// The same with all whose state belongs together: save_checkpoint(dir, {model, optimizer, scheduler, ema, sampler}).
// Anything that is a Stateful (include/tessera/stateful.h) can be in the list, with tensors of its own or without.
void save_checkpoint(const std::filesystem::path& dir, const TrainingState& state,
                     const nlohmann::json& extra = nlohmann::json::object(), const SaveOptions& options = {});

namespace internal {
class SaveJob;
}

// A save that goes on in the background. Move-only.
class [[nodiscard]] PendingSave {
 public:
  // For save_checkpoint_async(), which returns it.
  explicit PendingSave(std::shared_ptr<internal::SaveJob> job) : job_(std::move(job)) {}
  PendingSave(PendingSave&&) noexcept = default;
  PendingSave& operator=(PendingSave&&) noexcept = default;
  // Not collective. Returns when the checkpoint is complete or has failed; an error is then a warning (TORCH_WARN), and
  // thrown by the group's next save, if there is one. So too while an exception is on its way, which the save does not
  // mind; but then it waits for other ranks only as long as they are heard of.
  ~PendingSave();

  // Whether the save has ended, well or not, as far as this rank knows. Not collective. Any thread, as wait().
  bool done() const;

  // Returns when this rank's part of the state is copied, and may be written to; at once without
  // SaveOptions::copy_in_background. Not collective; throws nothing.
  void copied() const;

  // Returns when the checkpoint is complete, or throws CheckpointError, on all ranks. Not collective. A second call
  // returns at once.
  void wait();

 private:
  std::shared_ptr<internal::SaveJob> job_;
};

// The same in the background: copies this rank's shards to host memory (pinned, for a GPU), and returns; the model may
// be trained on at once. Costs the bytes of the shards in host memory, which the group keeps for its next such save.
// The checkpoint appears when all ranks are done, whether or not anybody waits. A rank that cannot write is an error of
// all that names it; so is one that gets no further, when a single step has taken four times the group's timeout.
PendingSave save_checkpoint_async(const std::filesystem::path& dir, ModelShards& model,
                                  torch::optim::Optimizer& optimizer,
                                  const nlohmann::json& extra = nlohmann::json::object(),
                                  const SaveOptions& options = {});
PendingSave save_checkpoint_async(const std::filesystem::path& dir, ModelShards& model,
                                  const nlohmann::json& extra = nlohmann::json::object(),
                                  const SaveOptions& options = {});

// The same of all that a program lists.
PendingSave save_checkpoint_async(const std::filesystem::path& dir, const TrainingState& state,
                                  const nlohmann::json& extra = nlohmann::json::object(),
                                  const SaveOptions& options = {});

// Loads a checkpoint, saved by any wrapper on any number of ranks, and returns its `extra`. Each rank reads the blocks
// that its shards lie in and verifies them; everything is read, on all ranks, before anything is changed. Sets
// parameters, buffers, the optimizer's state and hyper-parameters, and the random generators. What does not fit is
// listed all together: missing, unexpected, shape, dtype, optimizer. A checkpoint with optimizer state loads without an
// optimizer, not the other way. Waits first for an asynchronous save of the same group that is under way, whose error
// it does not throw.
nlohmann::json load_checkpoint(const std::filesystem::path& dir, ModelShards& model, torch::optim::Optimizer& optimizer,
                               const LoadOptions& options = {});
nlohmann::json load_checkpoint(const std::filesystem::path& dir, ModelShards& model, const LoadOptions& options = {});

// What is beside the model may be missing from the list, not from the checkpoint.
nlohmann::json load_checkpoint(const std::filesystem::path& dir, const TrainingState& state,
                               const LoadOptions& options = {});

// What load_newest_checkpoint() has loaded, and what it passed over: the errors, of unknown age first, then the newest.
struct LoadedCheckpoint {
  std::filesystem::path path;
  nlohmann::json extra;
  std::vector<std::string> damaged;
};

// Loads the newest complete checkpoint of a folder that is sound: one that is damaged is passed over for the one
// before, and told of in the result; one whose manifest is damaged, so that its age is not known, in any case. Nothing
// if the folder has none; CheckpointError with all their errors if none is sound, and for a folder that is a checkpoint
// itself. One that does not fit is a
// CheckpointMismatch, as of load_checkpoint(). What says nothing of a checkpoint is thrown too, since an older one
// would undo what the newest holds: StorageUnavailable for a store that does not answer, files that may not be opened,
// too many that are, a disk that does not read; CheckpointError for memory that ends. Waits as load_checkpoint() does.
// Collective.
std::optional<LoadedCheckpoint> load_newest_checkpoint(const std::filesystem::path& folder, const TrainingState& state,
                                                       const LoadOptions& options = {});
std::optional<LoadedCheckpoint> load_newest_checkpoint(const std::filesystem::path& folder, ModelShards& model,
                                                       torch::optim::Optimizer& optimizer,
                                                       const LoadOptions& options = {});

// The newest complete checkpoint among the entries of a folder; nothing if there is none. One whose manifest is damaged
// comes first, so that loading it says so. Throws CheckpointError for a folder that is a checkpoint itself. Not
// collective: let rank 0 ask, or make sure that no save is under way.
std::optional<std::filesystem::path> latest_checkpoint(const std::filesystem::path& folder);

}  // namespace tessera
