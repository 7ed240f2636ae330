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

// Removes superseded files on a background thread. The next save waits for it if its target exists, and so does the end
// of the program. A failure is only a warning: the new checkpoint is complete, and the next removal tries again.
class Removal {
 public:
  // Starts the thread, which runs `remove` after `before` (may be null) has ended.
  Removal(std::function<void()> remove, std::shared_ptr<Removal> before);
  ~Removal() { join(); }
  void join();
  bool has_ended() const { return ended_; }

 private:
  const pid_t process_ = ::getpid();
  std::atomic<bool> ended_ = false;
  std::mutex mutex_;  // guards join()
  std::thread thread_;
};

// State that one save of a group leaves to the next. Stored by group and not in the model, because the two saves may be
// of different models. Freed with the group.
struct GroupSaves {
  std::weak_ptr<SaveJob> job;        // the asynchronous save in flight
  std::string failure;               // the error of a save that was never waited for
  std::shared_ptr<Removal> removal;  // the last removal that was started
  at::Tensor host;                   // staging buffer of the next asynchronous save
};

// Makes the end of the program wait for removals. Must be called after a save has used the storage of `scheme`. Exit
// handlers run in reverse order, so the handlers of the storage's libraries (TLS) run after this wait.
void await_removals_at_exit(const std::string& scheme);

// Calls `visit` with the state of a group under a lock; `visit` must return soon.
void with_group_saves(const std::shared_ptr<Communicator>& comm, const std::function<void(GroupSaves&)>& visit);

}  // namespace tessera::internal
