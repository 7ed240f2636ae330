#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace tessera {

// Options of offload to host memory or disk (ZeRO-Offload, Ren et al., 2021). FSDP offloads shards between their uses.
// OSS offloads the parameters that a rank owns, between steps. Optimizer state is in the same memory, because
// optimizers allocate state where the parameters are. Limits may differ between ranks.
struct OffloadOptions {
  // FSDP: keeps shards in host memory. Copies each unit's shard to the device, in param_dtype if set, just before its
  // all-gather, one unit further ahead than `prefetch`. OSS: keeps copies of the owned parameters in host memory. The
  // optimizer steps these copies, and the new values are copied to the device.
  bool params = false;
  // FSDP: copies reduced gradients to host memory after their reduce-scatter. The copies overlap with backward, and are
  // complete when backward returns. On an accelerator, this option must equal `params`, because optimizers cannot step
  // a host parameter with a device gradient. OSS: frees the device's gradients after the step has copied them, and
  // implies `params`. Until zero_grad(), `.grad` is then a placeholder that throws.
  bool grads = false;
  // true: uses page-locked memory, which devices access directly. On CPUs, locks nothing, but reports count the memory
  // as pinned.
  bool pin_memory = true;
  // Upper limit of host memory for the offload, in bytes. 0: no limit. If the offload needs more, FSDP's constructor or
  // backward, or OSS's step() (with nothing changed) throws std::runtime_error, which names the purpose and the rank.
  // If one rank's shards exceed its limit, FSDP's constructor throws on all ranks, and does not change the module.
  int64_t host_limit_bytes = 0;
  // FSDP only, with `params`: a folder on a local disk for the shards of the units selected by `disk_units`. HostAdam
  // and HostAdamW keep their state there, too; other optimizers keep state in host memory. Empty: no disk.
  std::string directory{};
  // Selects the units on disk by the names that describe() prints: "blocks.3". Empty: all.
  std::function<bool(const std::string& unit)> disk_units{};
  // Upper limit of host memory, in bytes, for data between disk, optimizer and device. Must exceed each shard's bytes.
  int64_t disk_buffer_bytes = int64_t{256} << 20;
  // FSDP only, with `params` and `grads`: the fraction of the model's parameters, 0 to 1, that stays on the device with
  // its gradients and optimizer state. Keeps the first units of describe() there, and skips a unit that no longer fits.
  // Their gradients arrive last, so the host would step them after backward has ended (Megatron-LM's
  // `--optimizer-offload-fraction`, DeepSpeed's `ratio` of ZeRO-Offload++). 0: all units are offloaded.
  double device_fraction = 0;
};

using CpuOffload = OffloadOptions;  // PyTorch's name of this struct

}  // namespace tessera
