#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>

#include "core/runtime/guarded_by.h"
#include "core/runtime/run_clock.h"

namespace tessera::internal {

// The unfinished operations of an NCCL group, which a device runs in the order of their start. Also tracks the end of
// the group: begin_end() begins the end, and complete_end() sets its reason. Thread-safe.
class NcclQueue {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Clock = RunClock;
  struct Operation {
    Work work;
    std::string description;
    Clock::time_point began;
  };

  void push(Work work, const std::string& description);

  // The state of the queue after completed operations are removed.
  struct Look {
    std::string error;  // error of the oldest operation; "" if it has none
    std::optional<Operation> oldest;
    bool ends;                    // whether the group is ending or has ended
    uint64_t ended_count;         // number of operations removed so far
    std::deque<Operation> ended;  // operations that this look() removed; destroyed by the caller, outside the lock
  };
  Look look();

  // Blocks for the duration, and returns true. Returns false as soon as `stop` is requested.
  bool sleep(const std::stop_token& stop, std::chrono::milliseconds duration);
  // Makes wait_until_empty() check the queue again, after look() has removed operations.
  void notify();
  // Blocks until the queue is empty or the group has ended.
  void wait_until_empty();

  // Begins the end of the group. Returns the description of the oldest operation; nullopt if the end had already begun.
  std::optional<std::string> begin_end();
  // Sets the reason of the end. Must follow begin_end(). `is_told` says whether the program knows this reason already.
  void complete_end(std::string reason, bool is_told);
  // Returns the reason once the end is complete, else nullopt. The caller must throw an error with this reason.
  std::optional<std::string> reason_to_tell();
  struct End {
    std::string reason;
    bool is_told;
  };
  // Blocks while the group is ending. Returns nullopt if the end has not begun.
  std::optional<End> wait_for_end();

 private:
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<Operation> operations_ TESSERA_GUARDED_BY(mutex_);  // oldest operation first
  uint64_t ended_count_ TESSERA_GUARDED_BY(mutex_) = 0;
  bool ends_ TESSERA_GUARDED_BY(mutex_) = false;
  std::optional<End> end_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::internal
