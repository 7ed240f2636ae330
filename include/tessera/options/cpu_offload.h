#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace tessera {

// Placement of shards between uses (ZeRO-Offload, Ren et al., 2021). Optimizer state follows the shards, because
// optimizers allocate state where the parameters are.
struct CpuOffload {
  // Keeps shards in host memory. Copies each unit's shard to the device just before its all-gather, one unit further
  // ahead than `prefetch`, in param_dtype if set.
  bool params = false;
  // Copies reduced gradients to host memory after their reduce-scatter, overlapped with backward; they have arrived
  // when backward returns. On an accelerator it must equal `params`: optimizers cannot step a host parameter with a
  // device gradient.
  bool grads = false;
  // Uses page-locked memory, which devices access directly.
  bool pin_memory = true;
  // Upper limit of the wrapper's host memory, in bytes. 0: no limit. Beyond it, construction or backward throws
  // std::runtime_error that names the purpose and the rank.
  int64_t host_limit_bytes = 0;
  // With `params`: a folder on a local disk. The shards of the units selected by `disk_units` are kept there, as is
  // their state with HostAdam and HostAdamW; other optimizers keep state in host memory. Empty: no disk.
  std::string directory;
  // Selects the units on disk, by name as in describe(): "blocks.3". Empty: all.
  std::function<bool(const std::string& unit)> disk_units;
  // Upper limit of host memory for data in flight between disk, optimizer and device.
  int64_t disk_buffer_bytes = int64_t{256} << 20;
};

}  // namespace tessera
