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
// memory of other ranks. If a rank dies, the surviving processes form a smaller group, and continue from the newest
// step whose parts are all still in memory. A restarted or spare process joins between two steps, and copies its part
// from the members' memory. docs/elastic.md is the guide.
//
//   tessera::Elastic elastic(options);
//   elastic.run([&](tessera::ElasticRun& run) {   // called again after each change of the group
//     auto model = ...;                           // make everything that uses the group here
//     tessera::FullyShardedDataParallel fsdp(model, run.comm());
//     tessera::AdamW optimizer(fsdp.parameters(), 1e-3);
//     run.restore({fsdp, optimizer, sampler});    // from memory or a checkpoint, otherwise unchanged
//     while (run.step() < steps) {
//       ...                                       // one step
//       run.commit();
//     }
//   });
//
// Sources: Gemini (SOSP'23) for copies in the memory of other hosts, torchft for regrouping without new processes,
// NVIDIA Resiliency Extension for running the body again.

// The rule for the number of samples in a step when the world size changes.
enum class ElasticBatch {
  kKeep,   // accumulation() grows as ranks are lost, so a step has at least as many samples as at first
  kFollow  // accumulation() is 1: the number of samples is proportional to the world size
};

// Options of Elastic. Must be equal on all ranks.
struct ElasticOptions {
  int copy_every = 10;  // steps between copies; a death loses at most these steps and the steps during a copy
  int copies = 1;       // number of other ranks that hold each rank's part; this many may die at once
  int least_ranks = 1;  // minimum world size; with fewer survivors, run() throws
  int most_ranks = 0;   // maximum world size; additional processes wait; 0: the first world size
  ElasticBatch batch = ElasticBatch::kKeep;
  // A rank is excluded from the next group if it stays in a broken group, or if its process is silent, for this long.
  std::chrono::milliseconds stopped_after = std::chrono::seconds(10);
  std::chrono::milliseconds regroup_timeout = std::chrono::minutes(2);  // if a regroup takes longer, run() throws
  // A folder of checkpoints that the program itself saves, with an integer "step" in `extra`. If no step is complete in
  // memory, restore() loads the newest checkpoint. Empty: none.
  std::filesystem::path checkpoints{};
  // A folder for one job, accessible to all of its processes. A file there lists the members. A process that finds a
  // live member joins the run instead of starting one. With TESSERA_ELASTIC_JOIN=1 in its environment, a process only
  // joins, and waits for members. Empty: the folder of spawn_elastic(). Without a folder, no process can join.
  std::filesystem::path rendezvous{};
  // Options of each group. Operations that wait for a stopped rank throw after `group.timeout`. If a launcher started
  // the ranks, CUDA without an index chooses the device as InitOptions::device does.
  GroupOptions group = {.timeout = std::chrono::seconds(60)};
  ProcessSetup process = {};
};

// A change of the group, as seen by this rank.
struct ElasticChange {
  std::vector<int> lost;    // lost ranks, by their numbers in the previous group
  std::vector<int> joined;  // new ranks, by their numbers in this group
  std::string reason;       // first line of the error that ended the previous group; in a new rank, that it joined
  int world_before = 0;
  double seconds = 0;  // from this rank's error to the end of the next step; 0 until that end
};

namespace internal {
class ElasticState;
class ElasticRunState;
}  // namespace internal

// Options of spawn_elastic().
struct SpawnElasticOptions {
  int least_ranks = 1;  // if fewer ranks than this are running or have succeeded, all ranks are ended
  // Maximum number of restarts of each rank. A failed rank is restarted only while another rank is alive, because the
  // new process joins the others' group as a new rank. 0: no restarts.
  int restarts = 3;
  std::chrono::milliseconds grace = std::chrono::seconds(30);  // as in spawn_local()
};

// Like spawn_local(), for an elastic run. If a rank fails, prints its error, keeps the other ranks running, and starts
// the failed rank again. Returns 0 at the end if at least `least_ranks` have ended without error. If a failure leaves
// too few ranks, ends the others, and returns the failed rank's exit code. Throws like spawn_local(). Also throws
// std::invalid_argument unless `least_ranks` is 1 to `world` and `restarts` is at least 0.
int spawn_elastic(int world, int argc, char** argv, const SpawnElasticOptions& options = {});

// One group of an elastic run, on one rank. Must be used only inside the body, by the thread that runs the body.
class ElasticRun {
 public:
  const std::shared_ptr<Communicator>& comm() const;  // the current group
  // Returns the number of completed steps. After restore(), counts from the step of the restored state.
  int64_t step() const;
  // Returns the number of backward passes in a step. kKeep: first / current world size, rounded up. kFollow: 1.
  int accumulation() const;
  int first_world() const;     // world size of the first group, also in a process that has joined later
  int64_t generation() const;  // number of changes of the group so far; 0 for the first group
  // Returns the change that led to this group; nullopt for the first group.
  const std::optional<ElasticChange>& change() const;

  // Restores the state from copies in memory, or else from the newest checkpoint in ElasticOptions::checkpoints. If
  // there is neither, leaves the state unchanged; but if the run had already copied a step, throws CheckpointError.
  // Registers the state for commit(); its objects must outlive the last commit(). Returns the restored `extra`, or an
  // empty object. Collective. Must be called once, before the first commit(). Throws as load_checkpoint() does, and
  // std::invalid_argument on every rank if the ranks list different objects.
  nlohmann::json restore(const TrainingState& state);

  // Ends a step. Returns at once, except every `copy_every` steps: then waits for the previous copy, stages this rank's
  // part with `extra` (as in save_checkpoint()), and starts to copy on a background thread. Other hosts receive only
  // changed blocks. Collective. Throws CommError if a rank is lost or, after this step's copy, if a process joins. The
  // body must not catch this error. Throws std::logic_error before restore().
  void commit(const nlohmann::json& extra = nlohmann::json::object());

  // Returns the bytes of this rank's parts and copies. Ranks of one host share this memory, and each rank counts it.
  int64_t copied_bytes() const;

 private:
  friend class Elastic;
  explicit ElasticRun(internal::ElasticRunState& state) : state_(state) {}
  internal::ElasticRunState& state_;
};

// This process's membership in an elastic run. A process may have one object at a time, unless ranks are threads.
class Elastic {
 public:
  // Forms a group with the ranks that the launcher has started, like init(). The program must not also call init().
  // Collective, except in a process that joins later (ElasticOptions::rendezvous) and waits in run() instead. Throws
  // std::invalid_argument for invalid or unequal options, and CommError like init().
  explicit Elastic(ElasticOptions options = {});
  // For a program with its own store, which Elastic uses only in this constructor. Ignores ElasticOptions::process.
  // Begins a run; a process that joins a run later must use the other constructor.
  Elastic(c10::intrusive_ptr<c10d::Store> store, int rank, int size, ElasticOptions options = {});
  ~Elastic();  // stops serving other ranks; does not wait for them
  Elastic(const Elastic&) = delete;
  Elastic& operator=(const Elastic&) = delete;

  // Runs the body once for each group, until the body returns on all ranks. Collective. If a rank is lost, the body's
  // operation throws CommError, which must leave the body. Then the ranks regroup, and the body runs again with the
  // next group. Objects that use the group must be local to the body. If another exception leaves the body and no rank
  // is lost, the others continue without this rank, and run() rethrows the exception. Throws CommError if the survivors
  // cannot regroup (docs/elastic.md), if they continue without this rank, or if all fail three times after the same
  // step.
  //
  // A process that joins first waits until it is a member. If the run ends first, returns without calling the body.
  // Throws CommError if all members end or are silent for `regroup_timeout`, std::invalid_argument for unequal options.
  void run(const std::function<void(ElasticRun& run)>& body);

 private:
  std::unique_ptr<internal::ElasticState> state_;
};

}  // namespace tessera
