#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <mutex>
#include <string>
#include <system_error>
#include <utility>

namespace tessera::testing_support {

// What this program asks of the file system, as faults_test.cpp, which stands in for the system's functions, sees it.
struct FileCall {
  enum Kind : uint8_t { kCreate, kMakeFolder, kWrite, kResize, kSync, kRename, kExchange, kRemove };
  Kind kind;
  std::string path;      // as it was named at that moment
  std::string to{};      // of a rename
  std::string data{};    // of a write
  int64_t position = 0;  // of a write; the new length
};

inline std::mutex file_calls_mutex;
inline std::atomic<bool> is_told = false;
inline std::function<void(const FileCall&)> tell_call;

// From here on `tell` is told of each call that went well, one at a time, in their order; no more with a null one.
inline void tell_file_calls(std::function<void(const FileCall&)> tell) {
  const std::lock_guard lock(file_calls_mutex);
  tell_call = std::move(tell);
  is_told = tell_call != nullptr;
}

// Does it, and tells of it.
template <class Act, class Describe>
auto observed(Act act, Describe describe) {
  if (!is_told) return act();
  const std::lock_guard lock(file_calls_mutex);
  const auto result = act();
  const int error = errno;
  if (result >= 0 && tell_call) tell_call(describe());
  errno = error;
  return result;
}

inline std::string path_of(int fd) {
  std::error_code ignored;
  return std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd), ignored).string();
}

}  // namespace tessera::testing_support
