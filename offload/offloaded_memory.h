#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <tessera/communicator.h>
#include <tessera/model/data_parallel.h>
#include <tessera/options/offload_options.h>
#include "core/memory/counted_buffers.h"
#include "core/memory/pinned_pool.h"
#include "core/runtime/copy_engine.h"
#include "offload/disk/disk_pager.h"

namespace tessera::internal {

// The engine that copies shards from host memory to the device, and the device buffers that receive these shards.
struct ShardSource {
  CopyEngine* engine = nullptr;  // null if shards are on the device
  CountedBuffers* staging = nullptr;
};

// The host and disk memory of shards and gradients under FsdpOptions::offload, and the engine that copies between this
// memory and the device. Empty without offload.
class OffloadedMemory {
 public:
  // Throws std::invalid_argument if parameters and gradients would be on different devices, or if disk_buffer_bytes is
  // out of range. Throws std::runtime_error if no file can be created in options.directory.
  OffloadedMemory(const OffloadOptions& options, const Communicator& world);

  // Sets for each unit whether it stays on the device. Without this call, all units are offloaded.
  void keep_on_device(std::vector<bool> units) { kept_on_device_ = std::move(units); }
  bool is_kept_on_device(size_t unit) const { return unit < kept_on_device_.size() && kept_on_device_[unit]; }

  // Return allocators of host or disk memory for a unit's shards and gradients; null if these are not offloaded.
  CountedBuffers::Memory shards(const std::string& unit);
  CountedBuffers::Memory low_precision_shards() { return options_.params ? on_host("the shards in 16 bit") : nullptr; }
  CountedBuffers::Memory gradients() { return options_.grads ? on_host("gradients") : nullptr; }
  ShardSource source() { return options_.params ? ShardSource{copies_.get(), &staging_} : ShardSource{}; }

  CopyEngine* copies() const { return copies_.get(); }  // null without offload
  CountedBuffers& staging() { return staging_; }        // device buffers of shards and reduced gradients in flight
  bool has_disk() const { return disk_ != nullptr; }

  // Sets the bytes of staging buffers, host memory and disk in `report`.
  void report(MemoryReport& report) const;

 private:
  CountedBuffers::Memory on_host(const char* purpose);

  const OffloadOptions options_;
  const std::string rank_;
  CountedBuffers staging_;
  PinnedPool host_;
  std::unique_ptr<DiskPager> disk_;     // null without a directory
  std::unique_ptr<CopyEngine> copies_;  // null without offload
  std::vector<bool> kept_on_device_;    // by unit
};

}  // namespace tessera::internal
