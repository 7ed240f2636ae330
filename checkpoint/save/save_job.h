#pragma once

#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include <tessera/checkpoint_options.h>
#include <tessera/communicator.h>
#include "checkpoint/save/commit.h"
#include "checkpoint/save/outcome.h"
#include "checkpoint/save/save_coordinator.h"
#include "checkpoint/save/save_plan.h"

namespace tessera::internal {

// One save, on one rank: begin() and then either run() or start() and wait(). begin(), run() and start() are
// collective.
//
// Three stages: each rank writes its files, and beside them what it wrote; the first rank of each subgroup of about
// sqrt(size) makes one of its subgroup's; rank 0 makes the manifest of those, and the checkpoint. So nobody reads more
// than sqrt(size) small files. No stage ends by the group's timeout while a rank gets on with its own (Heartbeat).
class SaveJob : public std::enable_shared_from_this<SaveJob> {
 public:
  // Waits for the group's save before this one, if any, and throws its error; then makes the temporary directory.
  static std::shared_ptr<SaveJob> begin(const std::filesystem::path& dir, std::shared_ptr<Communicator> comm,
                                        const SaveOptions& options);
  // Returns when the group's save that is under way, if any, has ended: not before, its checkpoint is not to be found.
  // Not collective; throws nothing: whoever has the save, or the next one, gets its error.
  static void await_save_before(const std::shared_ptr<Communicator>& comm);
  ~SaveJob();
  SaveJob(const SaveJob&) = delete;
  SaveJob& operator=(const SaveJob&) = delete;

  // Writes and commits; returns when the checkpoint is complete.
  void run(const std::function<SavePlan()>& plan);

  // Takes the plan and copies of its data to the host, then writes and commits on a thread. There, ranks tell each
  // other by notes how far they are: the communicator belongs to the loop's thread.
  void start(const std::function<SavePlan()>& plan);
  bool done() const { return done_; }
  void await_copies() const { copied_.wait(false); }
  // Returns when the checkpoint is complete. Not collective; throws alike on all ranks.
  void wait();

  // Ends the thread soon where it waits for ranks that are lost.
  void hurry() {
    if (coordinator_) coordinator_->hurry();
  }

 private:
  SaveJob(std::filesystem::path dir, std::shared_ptr<Communicator> comm, const SaveOptions& options);
  void join();

  void write_part();
  void merge_subgroup();  // leaders
  void commit();          // rank 0
  void clean_up();        // rank 0; begins it

  void background();
  void end_copies();
  void set_copied();

  const std::filesystem::path dir_;
  const std::string what_;  // for messages
  const std::shared_ptr<Communicator> comm_;
  const SaveOptions options_;
  const Subgroups subgroups_;
  Heartbeat heartbeat_;  // this rank's
  std::filesystem::path partial_path_;
  uint64_t id_ = 0;
  std::unique_ptr<PartialCheckpoint> partial_;  // rank 0's
  SavePlan plan_;
  HostCopies copies_;  // of an asynchronous save
  std::atomic<bool> copied_ = true;
  std::optional<SaveCoordinator> coordinator_;
  std::mutex joining_;  // of the next, by the loop's thread and by one that waits for this save
  std::thread thread_;
  std::atomic<bool> done_ = false;
  Outcome result_;                       // of the background save, the same on all ranks
  std::atomic<bool> delivered_ = false;  // somebody was told
};

}  // namespace tessera::internal
