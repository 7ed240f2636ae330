#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "tessera/comm/communicator.h"

namespace tessera {

class SaveJob;

// Removes what a complete checkpoint makes needless, on a thread: nobody waits for it but the end of the program. A
// failure is a warning: what was saved is there, and the next removal tries again.
class Removal {
 public:
  // Begins when the one before has ended.
  Removal(std::function<void()> remove, std::shared_ptr<Removal> before)
      : thread_([this, remove = std::move(remove), before = std::move(before)]() mutable {
          if (before) before->join();
          before.reset();
          try {
            remove();
          } catch (const std::exception& error) {
            TORCH_WARN(error.what());
          }
          remove = nullptr;
          ended_ = true;
        }) {}
  ~Removal() { join(); }
  void join() {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) return;
    if (::getpid() == process_)
      thread_.join();
    else
      thread_.detach();  // of the process that this one was forked from: there is no such thread here
  }
  bool has_ended() const { return ended_; }

 private:
  const pid_t process_ = ::getpid();
  std::atomic<bool> ended_ = false;
  std::mutex mutex_;  // of join()
  std::thread thread_;
};

// Each group's asynchronous save that is under way, and the error of one that nobody waited for, so that the next save
// can wait and tell. Kept by group, not in the model, because the two saves may be of different models; gone with the
// group.
struct Underway {
  std::weak_ptr<SaveJob> job;
  std::string failure;
  std::shared_ptr<Removal> removal;
  at::Tensor host;  // memory for the copies of the next asynchronous save
};

// The end of the program waits for removals. Called when a save has used the storage of that scheme, since what that
// needs (the cryptography of its connections, say) is gone by then if it was made later.
void await_removals_at_exit(const std::string& scheme);

// Lets `use` look at, and change, what is under way of a group; one thread at a time, so it returns soon.
void with_underway(const std::shared_ptr<Communicator>& comm, const std::function<void(Underway&)>& use);

}  // namespace tessera
