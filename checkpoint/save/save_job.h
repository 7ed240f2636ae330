#pragma once

#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <tessera/checkpoint/options.h>
#include <tessera/communicator.h>
#include "checkpoint/save/commit.h"
#include "checkpoint/save/outcome.h"
#include "checkpoint/save/save_coordinator.h"
#include "checkpoint/save/save_plan.h"

namespace tessera::internal {

// One save on one rank. Callers must call begin(), then either run() or start(). These three functions are collective.
// After start(), wait() is optional: the destructor also waits.
//
// Stage 1: each rank writes its files and a list of their content. Stage 2: the first rank of each subgroup of about
// sqrt(size) ranks merges its subgroup's lists. Stage 3: rank 0 merges these lists into the manifest and commits. So a
// rank reads only about sqrt(size) small files. The group's timeout does not end a stage that makes progress.
class SaveJob : public std::enable_shared_from_this<SaveJob> {
 public:
  // Waits for the group's previous save; throws its error unless wait() threw it. Then creates the temporary directory.
  // `objects` are lines that name the objects to save. If they differ between ranks, throws std::invalid_argument.
  static std::shared_ptr<SaveJob> begin(const std::filesystem::path& dir, std::shared_ptr<Communicator> comm,
                                        const SaveOptions& options, bool is_async,
                                        const std::vector<std::string>& objects);
  // Blocks until the group's save in flight, if any, has ended, so that its checkpoint can be found. Not collective.
  // Does not throw the save's error: the save's PendingSave or the group's next save throws it.
  static void await_save_before(const std::shared_ptr<Communicator>& comm);
  SaveJob(std::filesystem::path dir, std::shared_ptr<Communicator> comm, const SaveOptions& options);  // for begin()
  ~SaveJob();
  SaveJob(const SaveJob&) = delete;
  SaveJob& operator=(const SaveJob&) = delete;

  // Writes and commits the checkpoint. Blocks until the checkpoint is complete.
  void run(const std::function<SavePlan()>& plan);

  // Starts to copy the plan's data to the host, then writes and commits on a background thread. On that thread, ranks
  // communicate through the store, because the communicator belongs to the training loop's thread.
  void start(const std::function<SavePlan()>& plan);
  bool done() const { return done_; }
  void await_copies() const { copied_.wait(false); }
  // Blocks until the save has ended. Not collective. If it failed, throws its error once, here or in the next begin().
  void wait();

  // Shortens the background thread's waits for lost ranks (SaveCoordinator::hurry()).
  void hurry(bool all_ranks_leave = false) {
    if (coordinator_) coordinator_->hurry(all_ranks_leave);
  }
  // Calls hurry(true) for the group's save in flight, if any. Must be called only if all ranks leave a broken group.
  static void hurry_save_of(const std::shared_ptr<Communicator>& comm);

 private:
  void join();

  void write_part();
  void merge_subgroup();  // called only on the leader of each subgroup
  void commit();          // called only on rank 0
  void clean_up();        // called only on rank 0; starts the removal of superseded checkpoints

  void background();
  void end_copies();
  void set_copied();

  const std::filesystem::path dir_;
  const std::string what_;  // prefix of error messages
  const std::shared_ptr<Communicator> comm_;
  const SaveOptions options_;
  const Subgroups subgroups_;
  Heartbeat heartbeat_;  // progress of this rank
  std::filesystem::path partial_path_;
  uint64_t id_ = 0;
  std::unique_ptr<PartialCheckpoint> partial_;  // set only on rank 0
  SavePlan plan_;
  HostCopies copies_;  // used by an asynchronous save
  std::atomic<bool> copied_ = true;
  std::optional<SaveCoordinator> coordinator_;
  std::mutex joining_;  // serializes join(), which several threads may call
  std::thread thread_;
  std::atomic<bool> done_ = false;
  Outcome result_;                       // result of a background save; valid if done_
  std::atomic<bool> delivered_ = false;  // whether the user has received the result, as a return value or exception
};

}  // namespace tessera::internal
