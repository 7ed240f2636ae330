#pragma once

#include <sys/types.h>

#include <vector>

namespace tessera::internal {

// Who may read and write this process's memory under Yama's ptrace_scope 1, where by default its ancestors alone may:
// the processes that descend from `ancestor`, and only as long as an object of this kind lives (prctl PR_SET_PTRACER).
// The kernel remembers one such process for each; with several objects it is the one that is farthest up. Where there
// is no Yama, or it asks for something else, nothing happens. Thread-safe.
class TracerPermission {
 public:
  explicit TracerPermission(pid_t ancestor);  // 0: everybody, since those concerned have no ancestor in common
  ~TracerPermission();
  TracerPermission(const TracerPermission&) = delete;
  TracerPermission& operator=(const TracerPermission&) = delete;

  // What the kernel was told last: a process, 0 for none, or -1 for everybody.
  static long told();

 private:
  const pid_t ancestor_;
};

// This process, its parent, its parent's parent, as far as this PID namespace shows them.
std::vector<pid_t> lineage();

// The first process of the first lineage that is in all of them; 0 if there is none.
pid_t common_ancestor(const std::vector<std::vector<pid_t>>& lineages);

}  // namespace tessera::internal
