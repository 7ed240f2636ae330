#pragma once

#include <sys/types.h>

#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace tessera::internal {

// The process that made a group. A child of fork() has a copy of the group and its connections, but none of its
// threads. In the child, operations throw, abort() is a no-op, and the group is never destroyed.
class GroupProcess {
 public:
  GroupProcess();
  bool is_this() const;
  // In another process, throws CommError, whose text begins with `what`.
  void require_this(std::string_view what) const;

 private:
  const pid_t pid_;
};

// Each object counts as one live group of this process. Each Communicator owns one.
class LiveGroup {
 public:
  LiveGroup();
  ~LiveGroup();
  LiveGroup(const LiveGroup&) = delete;
  LiveGroup& operator=(const LiveGroup&) = delete;
};

// Calls `act` once, when the last group of this process has been destroyed. There must be a group. Thread-safe.
void call_after_last_group(void (*act)());

// Returns the text of an exception, without libtorch's stack trace. Null stands for a direct call of std::terminate().
std::string text_of(const std::exception_ptr& exception);
// The published reason if an exception whose text is not known destroys the group during unwinding.
inline constexpr char kUnwound[] = "an exception ended its use of the group";

template <class Group, class... Args>
std::shared_ptr<Group> make_group(Args&&... args) {
  return std::shared_ptr<Group>(new Group(std::forward<Args>(args)...), [process = GroupProcess()](Group* group) {
    if (process.is_this()) delete group;
  });
}

}  // namespace tessera::internal
