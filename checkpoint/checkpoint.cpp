#include <tessera/checkpoint.h>

#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>

#include <cmath>
#include <exception>
#include <iterator>
#include <sstream>
#include <typeinfo>
#include <variant>

#include <tessera/host_results.h>
#include <tessera/optim/averages.h>
#include <tessera/optim/fused_optimizers.h>
#include "checkpoint/load/find_checkpoints.h"
#include "checkpoint/load/load_state.h"
#include "checkpoint/save/commit.h"
#include "checkpoint/save/outcome.h"
#include "checkpoint/save/save_job.h"
#include "checkpoint/state/saved_state.h"
#include "core/comm/agreement.h"
#include "core/runtime/no_grad_no_inference_guard.h"
#include "offload/disk/disk_pager.h"

namespace tessera {
using namespace internal;
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

using State = StateObjects;
// Returns `state`. Throws std::invalid_argument while an optimizer's averages are swapped in. During a swap, optimizer
// state does not match the parameter values, and the end of the swap would overwrite loaded values.
State without_averages(State state) {
  for (const auto& [name, optimizer] : state.optimizers)
    if (const auto* averages = dynamic_cast<const Averages*>(optimizer);
        averages != nullptr && averages->are_swapped_in())
      throw std::invalid_argument(
          "the model has the averages, of swap_in_averages(); save and load with the optimizer after the scope");
  return state;
}
State state_of(const TrainingState& state) {
  return without_averages({state.model(), state.model_names(), state.optimizers(), state.beside()});
}
// Returns the state of a model that the caller passed without a TrainingState. Includes the model's Ema, if one exists.
State state_of(ModelShards& model, torch::optim::Optimizer* optimizer = nullptr) {
  State state = Ema::of(model) == nullptr ? State{model} : state_of(TrainingState({model}));
  if (optimizer != nullptr) state.optimizers.emplace("", optimizer);
  return without_averages(std::move(state));
}

// Returns whether each write to a tensor in the optimizer's step() increments the tensor's autograd version counter.
bool counts_writes(const torch::optim::Optimizer& optimizer) {
  const auto* shards = dynamic_cast<const OptimizerShards*>(&optimizer);
  const torch::optim::Optimizer& local = shards == nullptr ? optimizer : shards->local();
  const std::type_info& type = typeid(local);
  return type == typeid(torch::optim::Adam) || type == typeid(torch::optim::AdamW) ||
         type == typeid(torch::optim::RMSprop) || type == typeid(torch::optim::Adagrad) || type == typeid(Adam) ||
         type == typeid(AdamW);
}

// Throws std::invalid_argument for a value that a manifest cannot store. Called before this save writes any data.
void check_state_value(const std::string& name, const StateValue& value, const std::string& state_name) {
  const std::string where = " of the state '" + state_name + "'";
  if (!is_utf8(name)) throw std::invalid_argument("the name of a value" + where + " is not UTF-8");
  if (const auto* number = std::get_if<double>(&value); number != nullptr && !std::isfinite(*number))
    throw std::invalid_argument("'" + name + "'" + where + " is not finite");
  if (const auto* text = std::get_if<std::string>(&value); text != nullptr && !is_utf8(*text))
    throw std::invalid_argument("'" + name + "'" + where + " is a text that is not UTF-8");
}

void save(const fs::path& dir, const State& state, const json& extra, const SaveOptions& options) {
  SaveJob::begin(dir, state.model.comm(), options, /*is_async=*/false, describe_objects(state))->run([&] {
    return plan_save(state, extra, options);
  });
}

PendingSave save_async(const fs::path& dir, const State& state, const json& extra, const SaveOptions& options) {
  auto job = SaveJob::begin(dir, state.model.comm(), options, /*is_async=*/true, describe_objects(state));
  job->start([&] { return plan_save(state, extra, options); });
  return PendingSave(std::move(job));
}

// After a failed load, returns the path from which to load again, or "" if a retry cannot help. If another job replaced
// the checkpoint during the load, the ranks may have read parts of two checkpoints. As long as rank 0 holds `lock`, a
// replaced local checkpoint stays available under another path. Collective. Returns the same path on all ranks.
fs::path where_to_read_again(Communicator& comm, const fs::path& dir, const std::string& manifest_text,
                             const std::optional<ReadLock>& lock) {
  std::string next;
  try {
    if (lock) next = lock->moved_from(dir).string();
    if (next.empty() && comm.rank() == 0 && read_manifest_text(dir) != manifest_text) next = dir.string();
  } catch (const CheckpointError&) {  // the checkpoint was removed, so a retry cannot help
  }
  return gather_texts(comm, next, "looking at " + dir.string())[0];
}
constexpr int kMostReplacements = 20;  // maximum number of retries of a load, each after the checkpoint was replaced

json load(const fs::path& dir, const State& state, const LoadOptions& options) {
  const std::string what = "loading " + dir.string();
  Communicator& comm = *state.model.comm();
  comm.require_values(what);
  std::vector<std::string> lines = describe_load(dir, options);
  std::ranges::move(describe_objects(state), std::back_inserter(lines));
  require_agreement(comm, "which checkpoint to load", lines);
  SaveJob::await_save_before(state.model.comm());
  fs::path from = dir;
  std::optional<ReadLock> hold;  // held on rank 0 until all ranks have read the checkpoint
  for (int replacements = 0;; ++replacements) {
    // Only rank 0 reads the manifest. If all ranks read it, another job could replace the manifest between the reads.
    const auto texts = gather_results(comm, attempt([&] {
                                        if (comm.rank() != 0) return std::string();
                                        if (from == dir) hold.emplace(dir);
                                        const fs::path moved = hold->moved_from(from);
                                        return read_manifest_text(moved.empty() ? from : moved);
                                      }),
                                      what);
    try {
      Manifest manifest;
      on_all_ranks(comm, what, [&] { manifest = manifest_of(texts[0], from); });
      load_state(manifest, state, options, what);
      return manifest.extra.is_null() ? json::object() : manifest.extra;
    } catch (const CheckpointMismatch&) {
      throw;
    } catch (const CheckpointError&) {
      const fs::path next = where_to_read_again(comm, dir, texts[0], hold);
      if (replacements == kMostReplacements || next.empty() || (next == from && from != dir)) throw;
      from = next;
    }
  }
}

// Lists a folder's checkpoints as "name/sequence/name/sequence/...", newest first. Damaged checkpoints, whose age is
// unknown, come first and have an empty sequence. Collective. Returns rank 0's list, because the folder may change.
std::string list_newest_first(Communicator& comm, const fs::path& folder) {
  const auto names = attempt([&] {
    std::string all;
    if (comm.rank() != 0) return all;
    const auto [whole, damaged, sequences] = find_checkpoints(folder);
    for (size_t i = 0; i < whole.size(); ++i)
      all = whole[i].filename().string() + "/" + std::to_string(sequences[i]) + "/" + all;
    for (const auto& path : damaged) all = path.filename().string() + "//" + all;
    if (all.empty()) require_folder_of_checkpoints(folder);
    return all;
  });
  return gather_results(comm, names, "looking for checkpoints in " + folder.string())[0];
}

std::optional<LoadedCheckpoint> load_newest(const fs::path& folder, const State& state, const LoadOptions& options) {
  Communicator& comm = *state.model.comm();
  comm.require_values("loading the newest checkpoint in '" + folder.string() + "'");
  SaveJob::await_save_before(state.model.comm());
  constexpr int kMostListings = 1000;
  std::string listing = list_newest_first(comm, folder);
  std::istringstream newest_first(listing);
  LoadedCheckpoint loaded;
  int listings = 1;
  for (std::string name, sequence; std::getline(std::getline(newest_first, name, '/'), sequence, '/');) try {
      loaded.path = folder / name;
      loaded.extra = load(loaded.path, state, options);
      return loaded;
    } catch (const CheckpointMismatch&) {
      throw;
    } catch (const StorageUnavailable&) {
      throw;  // does not load an older checkpoint, because that would lose progress
    } catch (const OtherFailure&) {
      throw;
    } catch (const CheckpointError& error) {
      loaded.damaged.emplace_back(error.what());
      // Starts again if the list has changed. Another job may have removed the checkpoint, which is then not damaged.
      if (std::string now = list_newest_first(comm, folder); now != listing && listings++ < kMostListings) {
        listing = std::move(now);
        newest_first = std::istringstream(listing);
        loaded.damaged.clear();
      }
    }
  if (loaded.damaged.empty()) return std::nullopt;
  std::string message = folder.string() + ": none of its checkpoints can be read:";
  for (const auto& error : loaded.damaged) message += "\n  " + error;
  throw CheckpointError(message);
}

}  // namespace

StateObjects internal::state_objects_of(const TrainingState& state) { return state_of(state); }

std::vector<std::string> internal::describe_objects(const StateObjects& state) {
  std::vector<std::string> lines;
  if (state.optimizers.empty()) lines.emplace_back("optimizer none");
  for (const auto& [name, optimizer] : state.optimizers)
    lines.push_back("optimizer " + name + (name.empty() ? "" : " ") + c10::demangle(typeid(*optimizer).name()));
  for (const auto& name : state.models) lines.push_back("model " + name);
  for (const auto& stateful : state.beside) lines.push_back("beside the model " + stateful->state_name());
  return lines;
}

SavePlan internal::plan_save(const StateObjects& state, const json& extra, const SaveOptions& options) {
  const NoGradNoInferenceGuard quiet;
  check_extra(extra);  // before a copy, which recurses
  const auto shards = in_dense_order(state.model.shards_to_save());
  const Communicator& comm = *state.model.comm();
  SavePlan plan{.extra = extra.is_null() ? json::object() : extra};  // if the caller passes `{}`, `extra` is null
  plan.models = state.models;
  NamedOptimizers named = named_optimizers(shards, state.optimizers);
  bool all_count_writes = !named.empty();
  for (auto& [name, optimizer] : named) {
    plan.optimizers.emplace(name, local_optimizer(shards, optimizer));
    all_count_writes = all_count_writes && counts_writes(optimizer.whole());
  }
  const auto tensors = local_tensors(state.model, shards, named, state.beside);
  if (options.copy_in_background && all_count_writes)
    for (const LocalTensor& local : tensors)
      if ((local.kind == TensorKind::kParameter || local.kind == TensorKind::kState) &&
          DiskPager::of(local.tensor) == nullptr)
        plan.watched.push_back({local.fqn, local.tensor, writes_to(local.tensor)});
  plan.pieces = pieces_of(tensors, comm.rank());
  for (const auto& stateful : state.beside) {
    auto& values = plan.beside[stateful->state_name()] = stateful->state_values();
    for (const auto& [name, value] : values) check_state_value(name, value, stateful->state_name());
  }
  if (options.rng) plan.rng = generator_states(comm.device());
  return plan;
}

void save_checkpoint(const fs::path& dir, ModelShards& model, torch::optim::Optimizer& optimizer, const json& extra,
                     const SaveOptions& options) {
  save(dir, state_of(model, &optimizer), extra, options);
}
void save_checkpoint(const fs::path& dir, ModelShards& model, const json& extra, const SaveOptions& options) {
  save(dir, state_of(model), extra, options);
}
void save_checkpoint(const fs::path& dir, const TrainingState& state, const json& extra, const SaveOptions& options) {
  save(dir, state_of(state), extra, options);
}

PendingSave save_checkpoint_async(const fs::path& dir, ModelShards& model, torch::optim::Optimizer& optimizer,
                                  const json& extra, const SaveOptions& options) {
  return save_async(dir, state_of(model, &optimizer), extra, options);
}
PendingSave save_checkpoint_async(const fs::path& dir, ModelShards& model, const json& extra,
                                  const SaveOptions& options) {
  return save_async(dir, state_of(model), extra, options);
}
PendingSave save_checkpoint_async(const fs::path& dir, const TrainingState& state, const json& extra,
                                  const SaveOptions& options) {
  return save_async(dir, state_of(state), extra, options);
}

PendingSave::~PendingSave() {
  // During stack unwinding, other ranks may have failed, or may not know of the exception. So the save must not wait
  // for them until the group's timeout.
  if (job_ && std::uncaught_exceptions() > 0) job_->hurry();
}
bool PendingSave::done() const { return !job_ || job_->done(); }
void PendingSave::copied() const {
  if (job_) job_->await_copies();
}
void PendingSave::wait() {
  if (job_) job_->wait();
}

json load_checkpoint(const fs::path& dir, ModelShards& model, torch::optim::Optimizer& optimizer,
                     const LoadOptions& options) {
  return load(dir, state_of(model, &optimizer), options);
}
json load_checkpoint(const fs::path& dir, ModelShards& model, const LoadOptions& options) {
  return load(dir, state_of(model), options);
}
json load_checkpoint(const fs::path& dir, const TrainingState& state, const LoadOptions& options) {
  return load(dir, state_of(state), options);
}

std::optional<LoadedCheckpoint> load_newest_checkpoint(const fs::path& folder, const TrainingState& state,
                                                       const LoadOptions& options) {
  return load_newest(folder, state_of(state), options);
}
std::optional<LoadedCheckpoint> load_newest_checkpoint(const fs::path& folder, ModelShards& model,
                                                       torch::optim::Optimizer& optimizer, const LoadOptions& options) {
  return load_newest(folder, state_of(model, &optimizer), options);
}

}  // namespace tessera
