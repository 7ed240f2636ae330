#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <set>
#include <utility>
#include <vector>

namespace tessera::internal {

// Threads that take turns on the cores of a host, in simulated time. A thread has bursts of work, one after the other,
// and sleeps between them. Of those that are ready the one goes first that has had least of a core; where others wait
// it gives the core back after a time slice. Who has slept does not make up for it. As Linux's scheduler has it,
// simplified: threads are alike, and so are cores, and changing costs nothing.
//
// Used by one thread. Seconds from 0.
class CoreTurns {
 public:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  static constexpr double kSliceSeconds = 3e-3;  // Linux's, of a thread that others wait behind

  // `threads` threads that sleep, on `cores` cores, 1 or more. go_on(thread) is called when its burst is over, or when
  // it is time to wake up, and calls burst() or sleep() for it before it returns.
  CoreTurns(size_t threads, int cores, std::function<void(size_t thread)> go_on);

  double now_s() const { return now_s_; }
  bool sleeps(size_t thread) const { return threads_[thread].state == State::kAsleep; }
  // It works for so long next, as soon and as long as it has a core.
  void burst(size_t thread, double seconds);
  // It gives back its core, at most until then.
  void sleep(size_t thread, double until_s = kNever);
  // If it sleeps, it does so no longer than until then.
  void wake(size_t thread, double at_s);

  // Time goes by until something happens. Throws std::logic_error if nothing ever will.
  void advance();

 private:
  enum class State : uint8_t { kAsleep, kReady, kRunning };
  struct Thread {
    State state = State::kAsleep;
    double left_s = 0;   // of its burst, of one that is ready
    double taken_s = 0;  // of cores, until it last got one
    double wakes_s = kNever;
    double got_core_s = 0, ends_s = 0, slice_ends_s = 0;  // of one that runs
  };
  using Order = std::set<std::pair<double, size_t>>;

  void fill_cores();
  void leave_core(size_t thread);
  void make_ready(size_t thread);

  const size_t cores_;
  const std::function<void(size_t)> go_on_;
  double now_s_ = 0;
  std::vector<Thread> threads_;
  Order ready_;          // by what they have had of cores
  Order ends_, slices_;  // of those that run, when their bursts and slices end
  Order sleepers_;       // that know when they wake up
};

}  // namespace tessera::internal
