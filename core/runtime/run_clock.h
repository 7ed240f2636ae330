#pragma once

#include <algorithm>
#include <chrono>
#include <functional>

namespace tessera::internal {

// The clock of all deadlines. It is steady, and does not advance while this process is stopped: by Ctrl-Z, SIGSTOP, a
// debugger or a frozen container. So a job that was stopped and is continued does not time out. A thread reads the
// steady clock every kTick, and advances this clock by at most kMostGap. The thread ends if nothing uses this clock, so
// a wait must have a RunAlarm or call now() at least once a second. Thread-safe, also in a child of fork().
struct RunClock {
  using duration = std::chrono::nanoseconds;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<RunClock>;
  static constexpr bool is_steady = true;  // NOLINT(readability-identifier-naming): std requires this name

  static constexpr std::chrono::milliseconds kTick{100}, kMostGap{500};

  static time_point now() noexcept;
};

// The largest error of a wait until a RunClock deadline. System calls use another clock, so a wait consists of slices
// of at most this length.
inline constexpr std::chrono::milliseconds kLongestSlice{100};
inline std::chrono::nanoseconds next_slice(RunClock::time_point until) {
  return std::clamp<std::chrono::nanoseconds>(until - RunClock::now(), std::chrono::nanoseconds(0), kLongestSlice);
}

// Calls wait_for(slice) until it returns true or the deadline has passed. Returns the result of the last call.
template <class WaitFor>
bool wait_in_slices(RunClock::time_point until, WaitFor wait_for) {
  while (!wait_for(next_slice(until)))
    if (RunClock::now() >= until) return false;
  return true;
}

// Calls `act` once when RunClock reaches `until`, on another thread, unless the alarm is destroyed first. Used for
// library calls, whose timeouts use another clock. `act` must neither block nor throw, and must not make or destroy an
// alarm. The destructor waits for a running `act`.
class RunAlarm {
 public:
  RunAlarm(RunClock::time_point until, std::function<void()> act);
  ~RunAlarm();
  RunAlarm(const RunAlarm&) = delete;
  RunAlarm& operator=(const RunAlarm&) = delete;

 private:
  friend struct RunAlarms;
  const RunClock::time_point until_;
  const std::function<void()> act_;
};

}  // namespace tessera::internal
