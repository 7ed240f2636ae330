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

// Training that survives the death of ranks: every few steps each rank copies its part of the training state to the
// memory of other ranks. If a rank dies, the survivors keep their processes, form a smaller group, and continue from
// the newest step that is complete in memory. A restarted or spare process joins between two steps, and gets its part
// from the members' memory. docs/elastic.md is the guide.
//
//   tessera::Elastic elastic(options);
//   elastic.run([&](tessera::ElasticRun& run) {   // again after each change of the group
//     auto model = ...;                           // make everything that uses the group here
//     tessera::FullyShardedDataParallel fsdp(model, run.comm());
//     tessera::AdamW optimizer(fsdp.parameters(), 1e-3);
//     run.restore({fsdp, optimizer, sampler});    // from memory, else from the newest checkpoint, else as drawn
//     while (run.step() < steps) {
//       ...                                       // one step
//       run.commit();
//     }
//   });
//
// Sources: Gemini (SOSP'23) for copies in the memory of other hosts, torchft for the regroup within the processes,
// NVIDIA Resiliency Extension for the body that is run again.

// How the number of samples of a step follows the world.
enum class ElasticBatch {
  kKeep,   // ElasticRun::accumulation() grows as ranks are lost: the effective batch stays at least the first one
  kFollow  // accumulation() is 1: the effective batch shrinks and grows with the world
};

// Must be equal on all ranks.
struct ElasticOptions {
  int copy_every = 10;  // steps between copies; a death loses at most these, and the steps made during a copy
  int copies = 1;       // other ranks that hold each rank's part; as many deaths at once lose nothing
  int least_ranks = 1;  // with fewer survivors, run() throws
  int most_ranks = 0;   // further processes wait until there is room; 0: as many as the first group has
  ElasticBatch batch = ElasticBatch::kKeep;
  // A rank that does not leave a broken group, or whose process is silent, for so long is left out of the next one.
  std::chrono::milliseconds stopped_after = std::chrono::seconds(10);
  std::chrono::milliseconds regroup_timeout = std::chrono::minutes(2);  // then run() throws
  // A folder of checkpoints that the program saves itself, with an integer "step" in `extra`. restore() loads the
  // newest one if no step is complete in memory. Empty: none.
  std::filesystem::path checkpoints{};
  // A folder that all processes reach, also later ones, and that no other job uses. Its file names the current members.
  // A process that finds a member there joins the run, and does not begin one. If TESSERA_ELASTIC_JOIN is 1 in its
  // environment, it waits for a run to join. Empty: the folder of spawn_elastic(), else no process can join.
  std::filesystem::path rendezvous{};
  // Of the groups. An operation with a stopped rank throws after the timeout.
  GroupOptions group = {.timeout = std::chrono::seconds(60)};
  ProcessSetup process = {};
};

// A change of the group, as this rank saw it.
struct ElasticChange {
  std::vector<int> lost;    // ranks of the group before
  std::vector<int> joined;  // ranks of this group
  std::string reason;       // the error that ended the group before
  int world_before = 0;
  double seconds = 0;  // from this rank's error to the end of the first step after it; 0 until then
};

namespace internal {
class ElasticState;
class ElasticRunState;
}  // namespace internal

// Options of spawn_elastic().
struct SpawnElasticOptions {
  int least_ranks = 1;  // with fewer that run or have ended without error, all are ended
  // How often each rank is started again after a failure, while the others have a group. It joins them as a new rank.
  // 0: never.
  int restarts = 3;
  std::chrono::milliseconds grace = std::chrono::seconds(30);  // as in spawn_local()
};

// spawn_local() for an elastic run: if a rank fails, prints its error, leaves the others running, and starts the rank
// again. Returns 0 in the end if at least `least_ranks` have ended without error; else ends the ranks, and returns the
// exit code of the rank whose failure was one too many. Throws as spawn_local(), and std::invalid_argument unless
// `least_ranks` is 1 to `world` and `restarts` is at least 0.
int spawn_elastic(int world, int argc, char** argv, const SpawnElasticOptions& options = {});

// One group of an elastic run, on one rank. Must be used by the thread that runs the body, and not after it.
class ElasticRun {
 public:
  const std::shared_ptr<Communicator>& comm() const;  // the current group
  // Completed steps: 0 at first, and that of the restored state after restore().
  int64_t step() const;
  // Backward passes of each rank in one step. With kKeep: the first world size divided by the current one, rounded up.
  int accumulation() const;
  // 0 for the first group, plus 1 for each change.
  int64_t generation() const;
  // The change that led to this group; nullopt for the first one.
  const std::optional<ElasticChange>& change() const;

  // Restores the state from the copies in memory; else from the newest checkpoint in ElasticOptions::checkpoints, with
  // a warning after a loss; else leaves it as drawn. Registers the state for commit(). The objects must outlive the
  // body's last commit(). Returns the `extra` of the step; an empty object as drawn. Collective; must be called once,
  // before the first commit(). Throws as load_checkpoint().
  nlohmann::json restore(const TrainingState& state);

  // Ends a step. Every `copy_every` steps, stages this rank's part and starts to copy it; a thread gives it to the
  // partners meanwhile. Waits first for the copy before. Other hosts are not sent blocks that have not changed since
  // then. `extra` is as in save_checkpoint(). Collective. Throws CommError if a rank is lost, or, after the copy of
  // this step, if a process joins: the body must let it pass.
  void commit(const nlohmann::json& extra = nlohmann::json::object());

  // The bytes of the copies and own parts. Ranks of a host share memory, and each counts it.
  int64_t copied_bytes() const;

 private:
  friend class Elastic;
  explicit ElasticRun(internal::ElasticRunState& state) : state_(state) {}
  internal::ElasticRunState& state_;
};

// The process's part in an elastic run. One at a time in a process, unless ranks are threads.
class Elastic {
 public:
  // Meets the ranks that the launcher has started, as init(), which must not be called beside it. Collective, but not
  // in a process that joins later (ElasticOptions::rendezvous), which waits in run(). Throws std::invalid_argument for
  // wrong or unequal options, and CommError as init().
  explicit Elastic(ElasticOptions options = {});
  // For a program with a store of its own, as communicator_from(). The store is used by this constructor only. Begins a
  // run; a process that joins it later uses the other constructor.
  Elastic(c10::intrusive_ptr<c10d::Store> store, int rank, int size, ElasticOptions options = {});
  // Stops serving other ranks. Waits for no rank.
  ~Elastic();
  Elastic(const Elastic&) = delete;
  Elastic& operator=(const Elastic&) = delete;

  // Runs the body once for each group, until it returns on all ranks. If a rank is lost, the body's current operation
  // throws CommError, which must leave the body. Then the ranks regroup, and the body runs again with the next group.
  // Objects that use the group must belong to the body. Collective. A process that joins first waits for a place, and
  // returns without a call of the body if the run ends before.
  //
  // If another exception leaves the body, the other ranks go on without this one, and run() rethrows it. Throws
  // CommError if the survivors cannot regroup (docs/elastic.md has the rule), or have gone on without this rank, and in
  // a process that joins, if no member answers for `regroup_timeout`.
  void run(const std::function<void(ElasticRun& run)>& body);

 private:
  std::unique_ptr<internal::ElasticState> state_;
};

}  // namespace tessera
