#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace tessera::internal {

// The place of a process's Linux control groups (of a container, a Slurm job or systemd), version 1 or 2. A limit also
// applies to inner groups, so all limits from the process's group up to the root apply.
struct ControlGroups {
  std::string of_process;  // text in the format of /proc/<pid>/cgroup
  std::filesystem::path mounted_at = "/sys/fs/cgroup";

  static ControlGroups of_this_process();
};

// Returns the limit of CPU time, in cores (cpu.max; cpu.cfs_quota_us); nullopt if the time is unlimited or unknown.
std::optional<double> cpu_quota(const ControlGroups& groups);

// A memory limit that applies to this process.
struct MemoryLimit {
  int64_t limit_bytes;
  std::filesystem::path usage, stat;  // files of the group with that limit

  // Returns the group's memory that the kernel cannot reclaim without writing it to disk. Excludes inactive cached
  // files and pages marked MADV_FREE. 0 if unknown.
  int64_t needed_bytes() const;
  int64_t left_bytes() const { return limit_bytes - needed_bytes(); }
};
// Returns the limits of all groups on the path. An outer group's limit may be larger and yet leave less memory, because
// other groups below it use the same memory.
std::vector<MemoryLimit> memory_limits(const ControlGroups& groups);

}  // namespace tessera::internal
