#pragma once

#include <sys/types.h>

#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::internal {

// Identifies the process that created a group. A child of fork() has a copy of the group and its connections, but none
// of its threads. In the child, operations throw, abort() is a no-op, and the group is never destroyed.
class GroupProcess {
 public:
  GroupProcess();
  bool is_this() const;
  // Throws CommError if another process created the group. The error text begins with `what`.
  void require_this(std::string_view what) const;

 private:
  const pid_t pid_;
};

// Counts the live groups of this process: each Communicator owns one LiveGroup.
class LiveGroup {
 public:
  LiveGroup();
  ~LiveGroup();
  LiveGroup(const LiveGroup&) = delete;
  LiveGroup& operator=(const LiveGroup&) = delete;
};

// Sets the only function that is called, once, when this process destroys its last group. A group must exist.
// Thread-safe.
void call_after_last_group(void (*act)());

// Returns "rank 3" or "ranks 0, 1, 2". Names the first eight ranks and counts the others, as in "ranks ... and 5 more".
std::string ranks_text(const std::vector<int>& ranks);

// Returns the exception's text, without libtorch's stack trace. If null, returns "std::terminate() was called".
std::string text_of(const std::exception_ptr& exception);
// The reason that a group publishes if it is destroyed by stack unwinding, where the exception's text is unknown.
inline constexpr char kUnwound[] = "an exception ended its use of the group";

// Makes a group that a child of fork() never destroys.
template <class Group, class... Args>
std::shared_ptr<Group> make_group(Args&&... args) {
  return std::shared_ptr<Group>(new Group(std::forward<Args>(args)...), [process = GroupProcess()](Group* group) {
    if (process.is_this()) delete group;
  });
}

}  // namespace tessera::internal
