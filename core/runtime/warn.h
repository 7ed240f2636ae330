#pragma once

#include <string>

namespace tessera::internal {

// Passes a warning to set_warning_handler()'s function. Without such a function, passes it to libtorch's warning
// handler if the program has replaced that handler on this thread. Otherwise prints the warning to stderr while a group
// with ProcessSetup::print_warnings exists. Does not throw. Thread-safe.
void warn(const std::string& text) noexcept;

// Start, stop and report printing to stderr, for ProcessSetup::print_warnings. Thread-safe.
void start_printing_warnings();
void stop_printing_warnings();
bool prints_warnings();

}  // namespace tessera::internal
