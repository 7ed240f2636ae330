#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "core/comm/group_process.h"
#include "core/comm/watchdog/group_failure.h"
#include "core/comm/watchdog/group_news.h"
#include "core/comm/watchdog/heartbeat.h"
#include "core/comm/watchdog/stall_search.h"
#include "core/comm/watchdog/started_operations.h"
#include "core/comm/watchdog/wait_registry.h"
#include "core/comm/watchdog/watchdog.h"
#include "core/runtime/guarded_by.h"

namespace tessera::internal {

// Controls the loop of a thread that calls the store and may be stuck in a call. Thread-safe.
class LoopControl {
 public:
  // Blocks for the duration, and returns true. Returns false as soon as the loop must stop.
  bool sleep(std::chrono::milliseconds duration);
  // begin_calls() and end_calls() must enclose calls of the store.
  void begin_calls();
  void end_calls();
  void end_loop();

  // Stops the loop. Returns false if the loop has not ended after `patience`.
  bool stop(std::chrono::milliseconds patience);
  // Returns the duration of the calls in progress; 0 if there are none.
  std::chrono::milliseconds unanswered() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool must_stop_ TESSERA_GUARDED_BY(mutex_) = false;
  bool has_ended_ TESSERA_GUARDED_BY(mutex_) = false;
  std::optional<std::chrono::steady_clock::time_point> calls_since_ TESSERA_GUARDED_BY(mutex_);
};

// The callbacks of a Watchdog. The Watchdog's destructor calls clear(). Thread-safe.
class WatchdogCallbacks {
 public:
  explicit WatchdogCallbacks(Watchdog::Callbacks callbacks) : callbacks_(std::move(callbacks)) {}
  void interrupt() {
    std::lock_guard lock(mutex_);
    if (callbacks_.interrupt) callbacks_.interrupt();
  }
  std::string why_disconnected() {
    std::lock_guard lock(mutex_);
    return callbacks_.why_disconnected ? callbacks_.why_disconnected() : "";
  }
  // Blocks until no callback is running. Afterwards no callback is called.
  void clear() {
    std::lock_guard lock(mutex_);
    callbacks_ = {};
  }

 private:
  std::mutex mutex_;
  Watchdog::Callbacks callbacks_ TESSERA_GUARDED_BY(mutex_);
};

// The state that a Watchdog shares with its thread. Both own the state, because the thread may be detached.
class WatchdogLoop : public WaitRegistry::Group, public std::enable_shared_from_this<WatchdogLoop> {
 public:
  WatchdogLoop(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Watchdog::Callbacks callbacks,
               const Watchdog::Options& options);

  void run();

  // See Watchdog.
  void publish_failure(const std::string& reason) noexcept;
  void await_readers() noexcept;

  const WaitRegistry::Place& place() const override { return place_; }
  std::optional<WaitRegistry::Wait> long_wait() override { return operations.long_wait(); }
  WaitRegistry::Progress progress() override { return operations.progress(); }

  // These members are thread-safe.
  const GroupProcess process;
  StartedOperations operations;
  GroupFailure failure;
  GroupNews news;
  LoopControl control;
  WatchdogCallbacks callbacks;

 private:
  void look_at_stall();
  void interrupt(const std::string& reason, bool is_published);
  void ask_for_news();
  void look_for_divergence();

  const WaitRegistry::Place place_;
  const int size_;
  std::once_flag awaited_readers_;
  StallSearch search_;
  Heartbeat heartbeat_;
  std::chrono::steady_clock::time_point asked_for_news_;
};

// Returns the text of an error for an exception that the store has thrown.
std::string lost_store_text(const std::exception& error);

}  // namespace tessera::internal
