#include "core/runtime/warn.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <typeinfo>
#include <utility>

#include <tessera/errors.h>

namespace tessera {
namespace {

using WarningFunction = std::function<void(const std::string&)>;

// Never destroyed: background threads may warn while the process ends.
struct Warnings {
  std::mutex mutex;
  std::shared_ptr<const WarningFunction> handler;  // guarded by mutex
  std::atomic<bool> are_printed = false;
};
Warnings& warnings() {
  static auto* const all = new Warnings;
  return *all;
}

}  // namespace

void set_warning_handler(std::function<void(const std::string&)> handler) {
  auto made = handler ? std::make_shared<const WarningFunction>(std::move(handler)) : nullptr;
  std::lock_guard lock(warnings().mutex);
  warnings().handler.swap(made);
}

void internal::warn(const std::string& text) noexcept {
  try {
    std::shared_ptr<const WarningFunction> handler;
    {
      std::lock_guard lock(warnings().mutex);
      handler = warnings().handler;
    }
    const c10::WarningHandler& of_thread = *c10::WarningUtils::get_warning_handler();
    if (handler) {
      (*handler)(text);
    } else if (typeid(of_thread) != typeid(c10::WarningHandler)) {
      TORCH_WARN(text);
    } else if (warnings().are_printed) {
      std::fprintf(stderr, "tessera: %s\n", text.c_str());
    }
  } catch (...) {  // NOLINT(bugprone-empty-catch): a warning must not end the work
  }
}

void internal::start_printing_warnings() { warnings().are_printed = true; }
void internal::stop_printing_warnings() { warnings().are_printed = false; }
bool internal::prints_warnings() { return warnings().are_printed; }

}  // namespace tessera
