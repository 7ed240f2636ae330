#pragma once

#include <atomic>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tessera/checkpoint/commit.h"
#include "tessera/checkpoint/options.h"
#include "tessera/checkpoint/outcome.h"
#include "tessera/checkpoint/saved_state.h"
#include "tessera/comm/communicator.h"

namespace tessera {

// What this rank has to write, taken from the model at one moment.
struct SavePlan {
  std::vector<Piece> pieces;
  std::optional<SavedOptimizer> optimizer;
  std::map<std::string, std::string> rng;
  nlohmann::json extra;  // rank 0's
};

// One save, on one rank: begin() and then either run() or start() and wait(). begin, run and wait
// are collective.
class SaveJob : public std::enable_shared_from_this<SaveJob> {
 public:
  // Waits for the group's save before this one, if any, and throws its error; then makes the
  // temporary directory.
  static std::shared_ptr<SaveJob> begin(const std::filesystem::path& dir, std::shared_ptr<Communicator> comm,
                                        const SaveOptions& options);
  ~SaveJob();
  SaveJob(const SaveJob&) = delete;
  SaveJob& operator=(const SaveJob&) = delete;

  // Writes and commits; returns when the checkpoint is complete.
  void run(const std::function<SavePlan()>& plan);

  // Takes the plan and copies of its data to the host, then writes and commits on a thread. There,
  // ranks tell rank 0 through files in the temporary directory that they are done, since the
  // communicator belongs to the training loop's thread.
  void start(const std::function<SavePlan()>& plan);
  bool done() const { return done_; }
  void wait();

  // Ends the thread soon, where it waits for other ranks.
  void cancel() { cancelled_ = true; }

 private:
  SaveJob(std::filesystem::path dir, std::shared_ptr<Communicator> comm, const SaveOptions& options);
  void join();
  std::string write_part(const SavePlan& plan);        // returns what rank 0 must know of it
  void commit(const std::vector<std::string>& parts);  // rank 0
  void background();
  void leave_message(const Outcome& outcome);        // other ranks
  std::vector<Outcome> await_messages(Outcome own);  // rank 0

  const std::filesystem::path dir_;
  const std::shared_ptr<Communicator> comm_;
  const SaveOptions options_;
  std::filesystem::path partial_path_;
  std::unique_ptr<PartialCheckpoint> partial_;  // rank 0's
  SavePlan plan_;
  std::thread thread_;
  std::atomic<bool> done_ = false;
  std::atomic<bool> cancelled_ = false;
  std::string failure_;     // of the background save; rank 0's
  bool delivered_ = false;  // somebody was told
};

}  // namespace tessera
