#pragma once

#include <sys/types.h>

#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace tessera::internal {

// The process that has made a group. A child of fork() has a copy of the group's memory and the same connections, but
// none of its threads: what it sent would be its parent's, and its end would wait for ever. So there operations throw,
// abort() does nothing, and a group's last owner leaves it as it is.
class GroupProcess {
 public:
  GroupProcess();
  bool is_this() const;
  // Throws CommError elsewhere, which begins with `what`.
  void require_this(std::string_view what) const;

 private:
  const pid_t pid_;
};

// What an exception says, without libtorch's stack trace: why a group ends. Null: that of std::terminate() alone.
std::string text_of(const std::exception_ptr& exception);
// Why one ends that an exception's unwinding destroys: its text is not known there.
inline constexpr char kUnwound[] = "an exception ended its use of the group";

template <class Group, class... Args>
std::shared_ptr<Group> make_group(Args&&... args) {
  return std::shared_ptr<Group>(new Group(std::forward<Args>(args)...), [process = GroupProcess()](Group* group) {
    if (process.is_this()) delete group;
  });
}

}  // namespace tessera::internal
