#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace tessera::internal {

// The limits of Linux control groups (of a container, a Slurm job, systemd) for this process, in versions 1 and 2. A
// group's limit also applies to inner groups, so the smallest limit from this group to the root applies. Thread-safe.
struct ControlGroups {
  std::string of_process;  // text in the format of /proc/<pid>/cgroup
  std::filesystem::path mounted_at = "/sys/fs/cgroup";

  static ControlGroups of_this_process();
};

// Returns the limit of CPU time, in cores (cpu.max; cpu.cfs_quota_us); nullopt if the time is unlimited or unknown.
std::optional<double> cpu_quota(const ControlGroups& groups);

// Returns the number of threads that can run concurrently: the cores of this process, but at most its quota rounded up.
int available_cores();

// The smallest memory limit that applies to this process.
struct MemoryLimit {
  int64_t limit_bytes;
  std::filesystem::path usage, stat;  // files of the group with that limit

  // Returns the group's memory that the kernel cannot reclaim without writing it to disk. Excludes inactive cached
  // files and pages marked MADV_FREE. 0 if unknown.
  int64_t needed_bytes() const;
};
std::optional<MemoryLimit> memory_limit(const ControlGroups& groups);

}  // namespace tessera::internal
