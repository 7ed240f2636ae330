#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace tessera::internal {

// The limits of Linux control groups (of a container, a Slurm job, systemd) for this process, in versions 1 and 2. A
// group's limit also applies to the groups inside it, so the smallest limit up to the root holds. Thread-safe.
struct ControlGroups {
  std::string of_process;  // text in the format of /proc/<pid>/cgroup
  std::filesystem::path mounted_at = "/sys/fs/cgroup";

  static ControlGroups of_this_process();
};

// Returns the CPU time of the group in cores (cpu.max; cpu.cfs_quota_us); nullopt if it is unlimited or unknown.
std::optional<double> cpu_quota(const ControlGroups& groups);

// Returns how many threads of this process can run concurrently: its cores, at most its quota rounded up, at least 1.
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
