#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <set>
#include <utility>
#include <vector>

namespace tessera::internal {

// Simulates threads that share the cores of a host, with a simplified Linux scheduler. A thread alternates between
// bursts of work and sleep. The ready thread with the least time on cores runs next, and yields after a time slice if
// other threads are ready. After sleep, a thread is ahead of the others by at most a slice. Context switches are free.
//
// Must be used by one thread. Time is in seconds from 0.
class CoreTurns {
 public:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  static constexpr double kSliceSeconds = 3e-3;  // Linux's time slice if other threads are ready

  // Creates `threads` sleeping threads on `cores` cores (1 or more). Calls go_on(thread) when a burst or sleep of the
  // thread ends. go_on() must call burst() or sleep() for this thread.
  CoreTurns(size_t threads, int cores, std::function<void(size_t thread)> go_on);

  double now_s() const { return now_s_; }
  bool sleeps(size_t thread) const { return threads_[thread].state == State::kAsleep; }
  // Schedules a burst of work, which starts as soon as a core is free.
  void burst(size_t thread, double seconds);
  // Makes the thread sleep until `until_s`, or until an earlier wake(). A sleeping thread uses no core.
  void sleep(size_t thread, double until_s = kNever);
  // Makes a sleeping thread wake at `at_s`, unless it wakes earlier anyway. A no-op for other threads.
  void wake(size_t thread, double at_s);

  // Advances time to the next event. Throws std::logic_error if there is no further event (a deadlock).
  void advance();

 private:
  enum class State : uint8_t { kAsleep, kReady, kRunning };
  struct Thread {
    State state = State::kAsleep;
    double left_s = 0;   // remaining seconds of the burst; valid if kReady
    double taken_s = 0;  // seconds on cores before the current turn; raised after a sleep (see the class)
    double wakes_s = kNever;
    double got_core_s = 0, ends_s = 0, slice_ends_s = 0;  // valid if kRunning
  };
  using Order = std::set<std::pair<double, size_t>>;

  void fill_cores();
  void leave_core(size_t thread);
  void make_ready(size_t thread);

  const size_t cores_;
  const std::function<void(size_t)> go_on_;
  double now_s_ = 0;
  std::vector<Thread> threads_;
  Order ready_;          // ready threads, sorted by Thread::taken_s
  Order ends_, slices_;  // running threads, sorted by the ends of their bursts and of their slices
  Order sleepers_;       // sleeping threads with a wake-up time, sorted by this time
};

}  // namespace tessera::internal
