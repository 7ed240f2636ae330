#include <c10/util/StringUtil.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include <tessera/launch.h>
#include "core/comm/group_process.h"
#include "core/comm/watchdog/watchdog.h"
#include "core/launch/launch_environment.h"
#include "core/launch/process_setup.h"
#include "core/runtime/call_with_timeout.h"
#include "core/runtime/guarded_by.h"

namespace tessera::internal {
namespace {

// The longest time for publishing, which may wait for a lock that the terminating thread holds.
constexpr auto kLongestEnd = std::chrono::seconds(10);

std::mutex terminating;
std::terminate_handler handler_before TESSERA_GUARDED_BY(terminating) = nullptr;
std::atomic<bool> prints_one_line = false;
std::terminate_handler handler_before_run_main = nullptr;  // set in the main thread

// Returns for example "rank 1 of 4: ", or "" in a world of one.
std::string name_of_rank() {
  try {
    const auto environment = read_launch_environment();
    if (environment.world_size > 1) return c10::str("rank ", environment.rank, " of ", environment.world_size, ": ");
  } catch (const std::invalid_argument&) {  // NOLINT(bugprone-empty-catch): init() reports an invalid environment
  }
  return "";
}

// Writes in one call, so that lines of different ranks do not mix.
void print_line(const std::string& text) {
  const std::string line = c10::str(program_invocation_short_name, ": ", name_of_rank(), text, "\n");
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

// Prints the error on one line, unless another process of the group has reported its end first. Ends the process.
[[noreturn]] void end_with_one_line(const std::exception_ptr& error) noexcept {
  // If several threads terminate, the first one ends the process.
  if (!terminating.try_lock())
    for (;;) std::this_thread::sleep_for(kLongestEnd);
  call_with_timeout(kLongestEnd, [text = text_of(error)] {
    std::cout.flush();
    std::fflush(stdout);
    if (Watchdog::is_first_to_tell()) print_line(text);
    Watchdog::publish_failure_of_process(text);
    return true;
  });
  std::_Exit(1);
}

// Whether `handler` is libstdc++'s verbose handler. Its output takes several calls, so the texts of ranks would mix.
bool is_verbose([[maybe_unused]] std::terminate_handler handler) {
#ifdef __GLIBCXX__
  return handler == &__gnu_cxx::__verbose_terminate_handler;
#else
  return false;
#endif
}

[[noreturn]] void tell_and_terminate() noexcept {
  if (const auto error = std::current_exception(); error && prints_one_line) end_with_one_line(error);
  std::terminate_handler before = nullptr;
  if (std::unique_lock lock(terminating, std::try_to_lock); lock) {
    before = handler_before;
    call_with_timeout(kLongestEnd, [text = text_of(std::current_exception())] {
      Watchdog::publish_failure_of_process(text);
      return true;
    });
  } else {
    std::this_thread::sleep_for(kLongestEnd);  // another thread publishes, and ends the process
  }
  if (const auto error = std::current_exception(); error && is_verbose(before))
    call_with_timeout(kLongestEnd, [text = text_of(error)] { return print_line("uncaught exception: " + text), true; });
  else if (before != nullptr)
    before();
  std::abort();
}

[[noreturn]] void terminate_in_run_main() noexcept {
  if (const auto error = std::current_exception(); error && prints_one_line) end_with_one_line(error);
  if (handler_before_run_main != nullptr) handler_before_run_main();
  std::abort();
}

// While this object exists, an uncaught exception ends the process as documented for tessera::run_main(). Only one
// object may exist, in the main thread.
class OneLineErrors {
 public:
  OneLineErrors() {
    handler_before_run_main = std::set_terminate(&terminate_in_run_main);
    prints_one_line = true;
  }
  ~OneLineErrors() {
    prints_one_line = false;
    if (std::get_terminate() == &terminate_in_run_main) std::set_terminate(handler_before_run_main);
  }
  OneLineErrors(const OneLineErrors&) = delete;
  OneLineErrors& operator=(const OneLineErrors&) = delete;
};

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

// If no catch clause is on the stack, __cxa_throw() calls std::terminate() before it unwinds, while the groups still
// exist. So this function must not catch exceptions, and must not be noexcept.
int run_body(const std::function<int()>& body) {
  const OneLineErrors one_line;
  return body();
}

}  // namespace tessera::internal
