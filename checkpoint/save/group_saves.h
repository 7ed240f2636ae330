#pragma once

#include <ATen/core/Tensor.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include <tessera/communicator.h>

namespace tessera::internal {

class SaveJob;

// Removes superseded files on a background thread. An exit handler waits for the thread. The next save also waits for
// the thread if the save's target exists. A failure only prints a warning, because the next removal tries again.
class Removal {
 public:
  // Starts the thread, which runs `remove` after the removal `before` has ended. `before` may be null.
  Removal(std::function<void()> remove, std::shared_ptr<Removal> before);
  ~Removal() { join(); }
  void join();
  bool has_ended() const { return ended_; }

 private:
  const pid_t process_ = ::getpid();
  std::atomic<bool> ended_ = false;
  std::mutex mutex_;  // serializes join()
  std::thread thread_;
};

// State that one save of a communicator group passes to the next save. Stored for each group and not for each model,
// because the two saves may be of different models. Freed by a later save once the group and its removal have ended.
struct GroupSaves {
  std::weak_ptr<SaveJob> job;        // the asynchronous save in flight
  std::string failure;               // error of a failed save for which the user never called wait()
  std::shared_ptr<Removal> removal;  // the most recently started removal
  at::Tensor host;                   // staging buffer for the next asynchronous save
};

// Registers an exit handler that waits for removals. Must be called after a save has used the storage of `scheme`. Exit
// handlers run in reverse order, so this wait ends before the exit handlers of the storage's libraries (TLS) run.
void await_removals_at_exit(const std::string& scheme);

// Calls `visit` with a group's state under a global lock. `visit` must not block.
void with_group_saves(const std::shared_ptr<Communicator>& comm, const std::function<void(GroupSaves&)>& visit);

}  // namespace tessera::internal
