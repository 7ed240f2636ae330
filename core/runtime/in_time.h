#pragma once

#include <chrono>
#include <future>
#include <optional>
#include <thread>
#include <utility>

namespace tessera::internal {

// Beyond the timeout that a call has been given itself, and should keep.
inline constexpr std::chrono::milliseconds kAnswerGrace{5000};

// What `ask` returns or throws, where it may never return: a thread calls it, and is left to itself if that takes
// longer than `patience`; then nothing. So `ask` owns what it uses.
template <class Ask>
auto in_time(std::chrono::milliseconds patience, Ask ask) -> std::optional<decltype(ask())> {
  std::packaged_task<decltype(ask())()> task(std::move(ask));
  auto answer = task.get_future();
  std::thread thread(std::move(task));
  const bool is_answered = answer.wait_for(patience) == std::future_status::ready;
  is_answered ? thread.join() : thread.detach();
  return is_answered ? std::optional(answer.get()) : std::nullopt;
}

}  // namespace tessera::internal
