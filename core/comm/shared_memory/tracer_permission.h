#pragma once

#include <sys/types.h>

#include <vector>

namespace tessera::internal {

// Permits the descendants of `ancestor` to access this process's memory under Yama's ptrace_scope 1, which by default
// permits its ancestors alone (prctl PR_SET_PTRACER). The permission ends with the object. The kernel keeps one
// permission for each process; of several objects, the highest ancestor gets it. A no-op without Yama or under another
// scope. Thread-safe.
class TracerPermission {
 public:
  explicit TracerPermission(pid_t ancestor);  // 0: any process, if the ranks have no common ancestor
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

// The first process of the first lineage that all lineages contain, or 0.
pid_t common_ancestor(const std::vector<std::vector<pid_t>>& lineages);

}  // namespace tessera::internal
