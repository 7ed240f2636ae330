#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace tessera {

// Where shards lie while they are not in use (ZeRO-Offload, Ren et al., 2021). What comes of the
// optimizer's state follows the shards, since optimizers make it where the parameters are.
struct CpuOffload {
  // Shards lie in host memory. Each unit's travels to the device right before its all-gather, one unit
  // further ahead than `prefetch`, in param_dtype if that is set.
  bool params = false;
  // Reduced gradients travel to host memory right after their reduce-scatter, beside backward, and
  // are there when backward returns. On an accelerator both or neither: no optimizer steps from a
  // gradient on one to a parameter on the other.
  bool grads = false;
  // In page-locked memory, which devices copy from and to without the host's help.
  bool pin_memory = true;
  // The most host memory that the wrapper may take, in bytes. 0: no bound. Beyond it construction or
  // backward throws std::runtime_error that says what the memory was for, and the rank.
  int64_t host_limit_bytes = 0;
  // With `params`: a folder on a local disk. The shards of the units that `disk_units` names lie there
  // instead, and so does their state with HostAdam and HostAdamW; other optimizers keep their state in
  // host memory. Empty: no disk.
  std::string directory;
  // Which units lie on the disk, by name as in describe(): "blocks.3". Empty: all.
  std::function<bool(const std::string& unit)> disk_units;
  // The most host memory for what is on its way between disk, optimizer and device.
  int64_t disk_buffer_bytes = int64_t{256} << 20;
};

}  // namespace tessera
