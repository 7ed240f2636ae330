#pragma once

#include <chrono>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include "core/runtime/run_clock.h"

namespace tessera::internal {

// If `ask` has a timeout, callers pass it plus this grace as `patience`, so that `ask` throws its own error first.
inline constexpr std::chrono::milliseconds kAnswerGrace{5000};

// Calls `ask` on a new thread. Returns the result of `ask` or throws its exception. If `patience` ends first, detaches
// the thread and returns nullopt. `ask` must own the data that it uses, because it may outlive the call.
template <class Ask>
auto call_with_timeout(std::chrono::milliseconds patience, Ask ask) -> std::optional<decltype(ask())> {
  std::packaged_task<decltype(ask())()> task(std::move(ask));
  auto answer = task.get_future();
  std::thread thread(std::move(task));
  const bool is_answered = wait_in_slices(
      RunClock::now() + patience, [&](auto slice) { return answer.wait_for(slice) == std::future_status::ready; });
  is_answered ? thread.join() : thread.detach();
  return is_answered ? std::optional(answer.get()) : std::nullopt;
}

}  // namespace tessera::internal
