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

// Removes what a complete checkpoint makes needless, on a thread: nobody waits for it but the end of the program. A
// failure is a warning: what was saved is there, and the next removal tries again.
class Removal {
 public:
  // Begins when the one before has ended.
  Removal(std::function<void()> remove, std::shared_ptr<Removal> before);
  ~Removal() { join(); }
  void join();
  bool has_ended() const { return ended_; }

 private:
  const pid_t process_ = ::getpid();
  std::atomic<bool> ended_ = false;
  std::mutex mutex_;  // of join()
  std::thread thread_;
};

// What one save of a group leaves to the next one. Kept by group, not in the model, because the two saves may be of
// different models; gone with the group.
struct GroupSaves {
  std::weak_ptr<SaveJob> job;        // the asynchronous save that is under way
  std::string failure;               // the error of one that nobody waited for
  std::shared_ptr<Removal> removal;  // the last one that was begun
  at::Tensor host;                   // memory for the copies of the next asynchronous save
};

// The end of the program waits for removals. Called when a save has used the storage of that scheme, since what that
// needs (the cryptography of its connections, say) is gone by then if it was made later.
void await_removals_at_exit(const std::string& scheme);

// Lets `visit` look at, and change, what there is of a group; one thread at a time, so it returns soon.
void with_group_saves(const std::shared_ptr<Communicator>& comm, const std::function<void(GroupSaves&)>& visit);

}  // namespace tessera::internal
