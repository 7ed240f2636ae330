#pragma once

#include <sys/types.h>

#include <vector>

namespace tessera::internal {

// Permits the descendants of `ancestor` to access this process's memory (prctl PR_SET_PTRACER). By default, Yama's
// ptrace_scope 1 permits only this process's ancestors. The permission ends with the object. The kernel keeps one
// permission for each process, so if several objects exist, the highest ancestor gets it. A no-op without Yama or under
// another ptrace_scope. Thread-safe.
class TracerPermission {
 public:
  explicit TracerPermission(pid_t ancestor);  // 0 permits any process, for ranks without a common ancestor
  ~TracerPermission();
  TracerPermission(const TracerPermission&) = delete;
  TracerPermission& operator=(const TracerPermission&) = delete;

  // Returns the permission in effect: a process id, 0 for none, or -1 for any process.
  static long told();

 private:
  const pid_t ancestor_;
};

// Returns this process, its parent, its grandparent and so on, as far as they are visible in this PID namespace.
std::vector<pid_t> lineage();

// Returns the first process in lineages[0] that is in all lineages, or 0 if there is none.
pid_t common_ancestor(const std::vector<std::vector<pid_t>>& lineages);

}  // namespace tessera::internal
