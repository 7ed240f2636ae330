#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>

#include "core/comm/watchdog/wait_registry.h"
#include "core/runtime/guarded_by.h"

namespace tessera::internal {

struct StartedOperation {
  uint64_t sequence;
  std::string description;
};

// The operations that a rank has started recently, and the current wait of its thread. Thread-safe.
class StartedOperations {
 public:
  // A wait that takes longer is a stall.
  static constexpr std::chrono::seconds kStallsAfter{1};
  // Number of recent operations to keep: more than are usually in flight, so older operations have ended on all ranks.
  static constexpr size_t kMostRecent = 64;

  void add(uint64_t sequence, std::string description);
  // Returns the last operations, oldest first.
  std::deque<StartedOperation> recent() const;
  WaitRegistry::Progress progress() const;

  // `sequence` must be nullopt if the wait is not for an operation that this thread has started.
  void begin_wait(std::optional<uint64_t> sequence);
  void end_wait();
  bool is_stalled() const;
  // Returns the current wait if it is a stall and has a sequence number, otherwise nullopt.
  std::optional<WaitRegistry::Wait> long_wait() const;

  // Calls `act` if the thread waits. Returns whether the thread waits. The wait cannot end before `act` returns.
  template <class Act>
  bool if_waiting(Act act) {
    std::lock_guard lock(mutex_);
    if (is_waiting_) act();
    return is_waiting_;
  }

 private:
  bool is_stalled_locked() const {
    return is_waiting_ && std::chrono::steady_clock::now() - wait_began_ > kStallsAfter;
  }

  mutable std::mutex mutex_;
  std::deque<StartedOperation> recent_ TESSERA_GUARDED_BY(mutex_);
  uint64_t starting_thread_ TESSERA_GUARDED_BY(mutex_) = thread_number();  // 0 if several threads start operations
  bool is_waiting_ TESSERA_GUARDED_BY(mutex_) = false;
  std::optional<uint64_t> awaited_ TESSERA_GUARDED_BY(mutex_);
  uint64_t waiting_thread_ TESSERA_GUARDED_BY(mutex_) = 0;
  std::chrono::steady_clock::time_point wait_began_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::internal
