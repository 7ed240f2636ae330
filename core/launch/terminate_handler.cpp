#include "core/launch/terminate_handler.h"

#include <chrono>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <utility>

#include "core/comm/group_process.h"
#include "core/comm/watchdog/watchdog.h"
#include "core/runtime/call_with_timeout.h"
#include "core/runtime/guarded_by.h"

namespace tessera::internal {
namespace {

// If publishing takes longer, it may wait for a lock of the terminating thread.
constexpr auto kLongestEnd = std::chrono::seconds(10);

std::mutex terminating;
std::terminate_handler handler_before TESSERA_GUARDED_BY(terminating) = nullptr;

[[noreturn]] void tell_and_terminate() noexcept {
  std::terminate_handler before = nullptr;
  // Only the first terminating thread publishes.
  if (std::unique_lock lock(terminating, std::try_to_lock); lock) {
    before = handler_before;
    call_with_timeout(kLongestEnd, [text = text_of(std::current_exception())] {
      Watchdog::publish_failure_of_process(text);
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
