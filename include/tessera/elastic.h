#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include <tessera/checkpoint/options.h>
#include <tessera/checkpoint/training_state.h>
#include <tessera/communicator.h>
#include <tessera/launch.h>

namespace tessera {

// Training that survives the death of ranks. Every few steps each rank copies its part of the training state to the
// memory of other ranks. If a rank dies, the survivors keep their processes, form a smaller group, and continue from
// the newest step that is complete in memory. A restarted or spare process joins between two steps, and gets its part
// from the members' memory. docs/elastic.md is the guide.
//
//   tessera::Elastic elastic(options);
//   elastic.run([&](tessera::ElasticRun& run) {   // called again after each change of the group
//     auto model = ...;                           // make everything that uses the group here
//     tessera::FullyShardedDataParallel fsdp(model, run.comm());
//     tessera::AdamW optimizer(fsdp.parameters(), 1e-3);
//     run.restore({fsdp, optimizer, sampler});    // from memory, or the newest checkpoint, or left as initialized
//     while (run.step() < steps) {
//       ...                                       // one step
//       run.commit();
//     }
//   });
//
// Sources: Gemini (SOSP'23) for copies in the memory of other hosts, torchft for the regroup within the processes,
// NVIDIA Resiliency Extension for the body that is run again.

// How the number of samples in a step depends on the world size.
enum class ElasticBatch {
  kKeep,   // accumulation() grows as ranks are lost: a step has at least as many samples as at first
  kFollow  // accumulation() is 1: the number of samples is proportional to the world size
};

// Options of Elastic. Must be equal on all ranks.
struct ElasticOptions {
  int copy_every = 10;  // steps between copies; a death loses at most these steps and those made during a copy
  int copies = 1;       // number of other ranks that hold each rank's part; as many may die at once without loss
  int least_ranks = 1;  // least size of a group; with fewer survivors, run() throws
  int most_ranks = 0;   // greatest size of a group; further processes wait; 0: the size of the first group
  ElasticBatch batch = ElasticBatch::kKeep;
  // A rank is excluded from the next group if it stays in a broken group, or its process is silent, for so long.
  std::chrono::milliseconds stopped_after = std::chrono::seconds(10);
  std::chrono::milliseconds regroup_timeout = std::chrono::minutes(2);  // longest regroup; then run() throws
  // A folder of checkpoints that the program itself saves, with an integer "step" in `extra`. restore() loads the
  // newest checkpoint if no step is complete in memory. Empty: none.
  std::filesystem::path checkpoints{};
  // A folder that all processes, also later ones, can reach, and that no other job uses. Its file names the members. A
  // process that finds a live member there joins its run, and begins none. With TESSERA_ELASTIC_JOIN=1 in its
  // environment, it waits for a run to join. Empty: the folder of spawn_elastic(), or else no process can join.
  std::filesystem::path rendezvous{};
  // Options of each group. An operation that waits for a stopped rank throws after this timeout.
  GroupOptions group = {.timeout = std::chrono::seconds(60)};
  ProcessSetup process = {};
};

// A change of the group, as seen by this rank.
struct ElasticChange {
  std::vector<int> lost;    // lost ranks, numbered as in the group before
  std::vector<int> joined;  // joined ranks, numbered as in this group
  std::string reason;       // the error that ended the group before
  int world_before = 0;
  double seconds = 0;  // from this rank's error to the end of the first step after it, in seconds; 0 until then
};

namespace internal {
class ElasticState;
class ElasticRunState;
}  // namespace internal

// Options of spawn_elastic().
struct SpawnElasticOptions {
  int least_ranks = 1;  // if fewer ranks than this run or have ended without error, all are ended
  // How often each rank is started again after a failure, while the other ranks have a group. The started process joins
  // that group as a new rank. 0: never.
  int restarts = 3;
  std::chrono::milliseconds grace = std::chrono::seconds(30);  // as in spawn_local()
};

// Like spawn_local(), for an elastic run. If a rank fails, prints its error, leaves the other ranks running, and starts
// the rank again. Returns 0 in the end if at least `least_ranks` have ended without error. If a failure leaves too few
// ranks, ends the others, and returns the failed rank's exit code. Throws as spawn_local() does. Throws
// std::invalid_argument also unless `least_ranks` is 1 to `world` and `restarts` is at least 0.
int spawn_elastic(int world, int argc, char** argv, const SpawnElasticOptions& options = {});

// One group of an elastic run, on one rank. Must be used only by the thread that runs the body, and only in the body.
class ElasticRun {
 public:
  const std::shared_ptr<Communicator>& comm() const;  // the current group
  // Returns the number of completed steps: 0 at first; after restore(), that of the restored state.
  int64_t step() const;
  // Returns the backward passes of a rank in one step. kKeep: first world size / current world size, rounded up.
  int accumulation() const;
  // Returns 0 for the first group, plus 1 for each change.
  int64_t generation() const;
  // Returns the change that led to this group; nullopt for the first group.
  const std::optional<ElasticChange>& change() const;

  // Restores the state from copies in memory, or else from the newest checkpoint in ElasticOptions::checkpoints.
  // Without either, keeps the state, or throws CheckpointError if a copied step is lost. Registers the state for
  // commit(); its objects must outlive the last commit(). Returns the restored `extra`, or an empty object. Collective.
  // Must be called once, before the first commit(). Throws as load_checkpoint() does.
  nlohmann::json restore(const TrainingState& state);

  // Ends a step. Every `copy_every` steps, waits for the previous copy, stages this rank's part, and starts the next
  // copy. A thread sends it to the partners; other hosts get only blocks that have changed since the previous copy.
  // `extra` is as in save_checkpoint(). Collective. Throws CommError if a rank is lost or, after this step's copy, if a
  // process joins. The body must not catch that error. Throws std::logic_error before restore().
  void commit(const nlohmann::json& extra = nlohmann::json::object());

  // Returns the bytes of the copies and own parts. Ranks of one host share this memory, and each rank counts it.
  int64_t copied_bytes() const;

 private:
  friend class Elastic;
  explicit ElasticRun(internal::ElasticRunState& state) : state_(state) {}
  internal::ElasticRunState& state_;
};

// The process's part in an elastic run. A process may have one at a time, unless ranks are threads.
class Elastic {
 public:
  // Meets the ranks that the launcher has started, like init(). The program must not call init(), too. Collective,
  // except in a process that joins later (ElasticOptions::rendezvous): such a process waits in run(). Throws
  // std::invalid_argument for wrong or unequal options, and CommError as init() does.
  explicit Elastic(ElasticOptions options = {});
  // For a program with its own store, like communicator_from(). Only this constructor uses the store. Begins a run. A
  // process that joins the run later must use the other constructor.
  Elastic(c10::intrusive_ptr<c10d::Store> store, int rank, int size, ElasticOptions options = {});
  // Stops serving other ranks. Does not wait for other ranks.
  ~Elastic();
  Elastic(const Elastic&) = delete;
  Elastic& operator=(const Elastic&) = delete;

  // Runs the body once for each group, until it returns on all ranks. If a rank is lost, the body's current operation
  // throws CommError, which must leave the body. Then the ranks regroup, and the body runs again with the next group.
  // Objects that use the group must belong to the body. Collective. In a process that joins, run() first waits for a
  // place. If the run ends before, run() returns there without a call of the body.
  //
  // If another exception leaves the body, the other ranks continue without this one, and run() rethrows it. Throws
  // CommError if the survivors cannot regroup (docs/elastic.md has the rule), or have continued without this rank. In a
  // process that joins, throws CommError if no member answers for `regroup_timeout`.
  void run(const std::function<void(ElasticRun& run)>& body);

 private:
  std::unique_ptr<internal::ElasticState> state_;
};

}  // namespace tessera
