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

// A file system call of this program, observed by faults_test.cpp, which replaces the system's functions.
struct FileCall {
  enum Kind : uint8_t { kCreate, kMakeFolder, kWrite, kResize, kSync, kRename, kExchange, kRemove };
  Kind kind;
  std::string path;      // at the time of the call
  std::string to{};      // of a rename
  std::string data{};    // of a write
  int64_t position = 0;  // of a write; or the new length
};

inline std::mutex file_calls_mutex;
inline std::atomic<bool> is_told = false;
inline std::function<void(const FileCall&)> tell_call;

// From now on, calls `tell` for each successful call, one at a time, in order; null: stops.
inline void tell_file_calls(std::function<void(const FileCall&)> tell) {
  const std::lock_guard lock(file_calls_mutex);
  tell_call = std::move(tell);
  is_told = tell_call != nullptr;
}

inline std::atomic<bool> is_asked = false;
inline std::function<int(const FileCall&)> refuse_call;

// From now on, calls `refuse` before each call; it returns an errno, or 0 to allow the call. Its own file system calls
// are exempt. Null: stops.
inline void refuse_file_calls(std::function<int(const FileCall&)> refuse) {
  const std::lock_guard lock(file_calls_mutex);
  refuse_call = std::move(refuse);
  is_asked = refuse_call != nullptr;
}

inline thread_local bool is_observing = false;

// Runs the call unless it is refused, and reports it.
template <class Act, class Describe>
auto observed(Act act, Describe describe) {
  if ((!is_told && !is_asked) || is_observing) return act();
  const std::lock_guard lock(file_calls_mutex);
  is_observing = true;
  const int refusal = refuse_call ? refuse_call(describe()) : 0;
  const auto result = refusal != 0 ? decltype(act())(-1) : act();
  const int error = refusal != 0 ? refusal : errno;
  if (result >= 0 && tell_call) tell_call(describe());
  is_observing = false;
  errno = error;
  return result;
}

inline std::string path_of(int fd) {
  std::error_code ignored;
  return std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd), ignored).string();
}

}  // namespace tessera::testing_support
