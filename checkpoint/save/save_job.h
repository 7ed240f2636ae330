#pragma once

#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include <tessera/checkpoint/options.h>
#include <tessera/communicator.h>
#include "checkpoint/save/commit.h"
#include "checkpoint/save/outcome.h"
#include "checkpoint/save/save_coordinator.h"
#include "checkpoint/save/save_plan.h"

namespace tessera::internal {

// One save on one rank: call begin(), then either run(), or start() and wait(). begin(), run() and start() are
// collective.
//
// Three stages: each rank writes its files and a list of their content; the first rank of each subgroup of about
// sqrt(size) ranks merges its subgroup's lists; rank 0 merges those into the manifest and commits. So a rank reads only
// about sqrt(size) small files. The group's timeout does not end a stage that makes progress.
class SaveJob : public std::enable_shared_from_this<SaveJob> {
 public:
  // Waits for the group's previous save, if any, and throws its error. Then creates the temporary directory.
  static std::shared_ptr<SaveJob> begin(const std::filesystem::path& dir, std::shared_ptr<Communicator> comm,
                                        const SaveOptions& options);
  // Blocks until the group's save in flight, if any, has ended and its checkpoint can be found. Not collective. Does
  // not throw: the PendingSave of that save, or the next save, throws its error.
  static void await_save_before(const std::shared_ptr<Communicator>& comm);
  ~SaveJob();
  SaveJob(const SaveJob&) = delete;
  SaveJob& operator=(const SaveJob&) = delete;

  // Writes and commits; returns when the checkpoint is complete.
  void run(const std::function<SavePlan()>& plan);

  // Copies the plan's data to the host, then writes and commits on a thread. On that thread the ranks communicate
  // through the store, because the communicator belongs to the training loop's thread.
  void start(const std::function<SavePlan()>& plan);
  bool done() const { return done_; }
  void await_copies() const { copied_.wait(false); }
  // Blocks until the checkpoint is complete. Not collective. The first call throws the save's error, on all ranks.
  void wait();

  // Makes the thread wait only briefly for lost ranks (SaveCoordinator::hurry()).
  void hurry(bool all_ranks_leave = false) {
    if (coordinator_) coordinator_->hurry(all_ranks_leave);
  }
  // Calls hurry() for the save in flight of a broken group that all ranks leave. The PendingSave may live longer.
  static void hurry_save_of(const std::shared_ptr<Communicator>& comm);

 private:
  SaveJob(std::filesystem::path dir, std::shared_ptr<Communicator> comm, const SaveOptions& options);
  void join();

  void write_part();
  void merge_subgroup();  // called on leaders of subgroups only
  void commit();          // called on rank 0 only
  void clean_up();        // called on rank 0 only; starts the removal

  void background();
  void end_copies();
  void set_copied();

  const std::filesystem::path dir_;
  const std::string what_;  // start of error messages
  const std::shared_ptr<Communicator> comm_;
  const SaveOptions options_;
  const Subgroups subgroups_;
  Heartbeat heartbeat_;  // progress of this rank
  std::filesystem::path partial_path_;
  uint64_t id_ = 0;
  std::unique_ptr<PartialCheckpoint> partial_;  // null except on rank 0
  SavePlan plan_;
  HostCopies copies_;  // used by an asynchronous save
  std::atomic<bool> copied_ = true;
  std::optional<SaveCoordinator> coordinator_;
  std::mutex joining_;  // serializes join(), which several threads may call
  std::thread thread_;
  std::atomic<bool> done_ = false;
  Outcome result_;                       // equal on all ranks after a background save
  std::atomic<bool> delivered_ = false;  // whether the result was returned or thrown
};

}  // namespace tessera::internal
