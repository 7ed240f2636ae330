#pragma once

#include <memory>
#include <string>

#include "core/memory/counted_buffers.h"
#include "core/memory/pinned_pool.h"
#include "core/model/memory_report.h"
#include "core/runtime/copy_engine.h"
#include "fsdp/flat_parameter.h"
#include "fsdp/options.h"
#include "fsdp/unit.h"
#include "offload/disk/disk_pager.h"

namespace tessera {

// Where shards and gradients lie with FsdpOptions::offload, in host memory or on a disk, and what brings them to the
// device and back. Without offload: nothing of it.
class OffloadedMemory {
 public:
  // Throws std::invalid_argument where an optimizer would have parameters and gradients in two places.
  OffloadedMemory(const CpuOffload& options, const Communicator& world);

  // Memory of a unit's shards and gradients; null: on the device.
  FlatParameterOptions::Memory shards(const std::string& unit);
  FlatParameterOptions::Memory low_precision_shards() {
    return options_.params ? on_host("the shards in 16 bit") : nullptr;
  }
  FlatParameterOptions::Memory gradients() { return options_.grads ? on_host("gradients") : nullptr; }
  // Where units get their shards from.
  ShardSource source() { return options_.params ? ShardSource{copies_.get(), &staging_} : ShardSource{}; }

  CopyEngine* copies() const { return copies_.get(); }  // null without offload
  CountedBuffers& staging() { return staging_; }        // shards and reduced gradients on their way
  bool has_disk() const { return disk_ != nullptr; }

  // Fills in what is staged now, in host memory and on the disk.
  void report(MemoryReport& report) const;

 private:
  FlatParameterOptions::Memory on_host(const char* purpose);

  const CpuOffload options_;
  const std::string rank_;
  CountedBuffers staging_;
  PinnedPool host_;
  std::unique_ptr<DiskPager> disk_;     // null without a directory
  std::unique_ptr<CopyEngine> copies_;  // null without offload
};

}  // namespace tessera
