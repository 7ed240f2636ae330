#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace tessera::internal {

// What Linux control groups (a container's, a Slurm job's, systemd's) let this process have. Both versions, 1 and 2; a
// group's limit holds for all below it, so the smallest on the way up counts. Any thread.
struct ControlGroups {
  std::string of_process;  // as /proc/<pid>/cgroup has it
  std::filesystem::path mounted_at = "/sys/fs/cgroup";

  static ControlGroups of_this_process();
};

// How many cores' time the processes of the group get together (cpu.max; cpu.cfs_quota_us); nothing if it is not
// limited, or not to be seen.
std::optional<double> cpu_quota(const ControlGroups& groups);

// How many threads of this process can run at a time: the cores that it may use, but no more than its quota, rounded
// up. At least 1.
int available_cores();

// The smallest limit of memory over this process.
struct MemoryLimit {
  int64_t limit_bytes;
  std::filesystem::path usage, stat;  // the files of the group that has it

  // What the group uses and the kernel cannot take back without writing it anywhere: not the cached files, nor what was
  // marked MADV_FREE. 0 if that is not to be seen any more.
  int64_t needed_bytes() const;
};
std::optional<MemoryLimit> memory_limit(const ControlGroups& groups);

}  // namespace tessera::internal
