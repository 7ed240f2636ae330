#include "core/launch/last_words.h"

#include <chrono>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <utility>

#include "core/comm/group_process.h"
#include "core/comm/watchdog/stall_watch.h"
#include "core/runtime/in_time.h"

namespace tessera::internal {
namespace {

// Who takes longer waits for what the thread that terminates holds.
constexpr auto kLongestEnd = std::chrono::seconds(10);

std::mutex terminating;  // guards the next
std::terminate_handler handler_before = nullptr;

[[noreturn]] void tell_and_terminate() noexcept {
  std::terminate_handler before = nullptr;
  // Not by a thread that terminates while another one does.
  if (std::unique_lock lock(terminating, std::try_to_lock); lock) {
    before = handler_before;
    in_time(kLongestEnd, [text = text_of(std::current_exception())] {
      StallWatch::publish_failure_of_process(text);
      return true;
    });
  }
  if (before != nullptr) before();
  std::abort();
}

}  // namespace

void tell_when_terminated() {
  std::lock_guard lock(terminating);
  if (handler_before == nullptr) handler_before = std::set_terminate(&tell_and_terminate);
}

void stop_telling_when_terminated() {
  std::lock_guard lock(terminating);
  if (handler_before == nullptr || std::get_terminate() != &tell_and_terminate) return;
  std::set_terminate(std::exchange(handler_before, nullptr));
}

}  // namespace tessera::internal
