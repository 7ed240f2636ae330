#include "plan/simulate/core_turns.h"

#include <algorithm>
#include <stdexcept>

#include "core/runtime/require.h"

namespace tessera::internal {

CoreTurns::CoreTurns(size_t threads, int cores, std::function<void(size_t)> go_on)
    : cores_(static_cast<size_t>(cores)), go_on_(std::move(go_on)), threads_(threads) {}

void CoreTurns::burst(size_t index, double seconds) {
  constexpr double kMostSeconds = 1e4;  // millions of time slices
  require(seconds <= kMostSeconds, "by the machine's speed, an operator or message takes ", seconds,
          " s, expected at most ", kMostSeconds);
  Thread& thread = threads_[index];
  thread.left_s = std::max(seconds, 0.0);
  if (thread.state == State::kAsleep) make_ready(index);
  if (thread.state != State::kRunning) return;
  ends_.erase({thread.ends_s, index});
  thread.ends_s = now_s_ + thread.left_s;
  ends_.emplace(thread.ends_s, index);
}

void CoreTurns::sleep(size_t index, double until_s) {
  Thread& thread = threads_[index];
  if (thread.state == State::kRunning) leave_core(index);
  if (thread.state == State::kReady) ready_.erase({thread.taken_s, index});
  thread.state = State::kAsleep;
  sleepers_.erase({thread.wakes_s, index});
  thread.wakes_s = until_s;
  if (until_s < kNever) sleepers_.emplace(until_s, index);
}

void CoreTurns::wake(size_t index, double at_s) {
  if (sleeps(index) && at_s < threads_[index].wakes_s) sleep(index, at_s);
}

void CoreTurns::advance() {
  fill_cores();
  const auto first_of = [](const Order& order) { return order.empty() ? kNever : order.begin()->first; };
  const double ends_s = first_of(ends_), wakes_s = first_of(sleepers_);
  const double slice_ends_s = ready_.empty() ? kNever : first_of(slices_);
  const double next_s = std::min({ends_s, wakes_s, slice_ends_s});
  if (next_s == kNever) throw std::logic_error("the simulated ranks wait for each other for ever");
  now_s_ = std::max(now_s_, next_s);
  if (ends_s == next_s) {
    go_on_(ends_.begin()->second);
  } else if (wakes_s == next_s) {
    const size_t thread = sleepers_.begin()->second;
    sleep(thread);
    go_on_(thread);
  } else {
    const size_t thread = slices_.begin()->second;
    constexpr double kNothingSeconds = 1e-12;
    if (threads_[thread].ends_s <= now_s_ + kNothingSeconds) return go_on_(thread);  // the burst has ended, too
    leave_core(thread);
    threads_[thread].state = State::kReady;
    ready_.emplace(threads_[thread].taken_s, thread);
  }
}

void CoreTurns::fill_cores() {
  while (ends_.size() < cores_ && !ready_.empty()) {
    const size_t index = ready_.begin()->second;
    ready_.erase(ready_.begin());
    Thread& thread = threads_[index];
    thread.state = State::kRunning;
    thread.got_core_s = now_s_;
    thread.ends_s = now_s_ + thread.left_s;
    thread.slice_ends_s = now_s_ + kSliceSeconds;
    ends_.emplace(thread.ends_s, index);
    slices_.emplace(thread.slice_ends_s, index);
  }
}

void CoreTurns::leave_core(size_t index) {
  Thread& thread = threads_[index];
  thread.left_s = std::max(thread.ends_s - now_s_, 0.0);
  thread.taken_s += now_s_ - thread.got_core_s;
  ends_.erase({thread.ends_s, index});
  slices_.erase({thread.slice_ends_s, index});
}

void CoreTurns::make_ready(size_t index) {
  Thread& thread = threads_[index];
  sleep(index);
  double least_s = ready_.empty() ? kNever : ready_.begin()->first;
  for (const auto& [ends_s, other] : ends_)
    least_s = std::min(least_s, threads_[other].taken_s + now_s_ - threads_[other].got_core_s);
  if (least_s < kNever) thread.taken_s = std::max(thread.taken_s, least_s - kSliceSeconds);
  thread.state = State::kReady;
  ready_.emplace(thread.taken_s, index);
}

}  // namespace tessera::internal
