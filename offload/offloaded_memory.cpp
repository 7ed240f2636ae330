#include "offload/offloaded_memory.h"

#include "core/runtime/require.h"

namespace tessera::internal {

OffloadedMemory::OffloadedMemory(const OffloadOptions& options, const Communicator& world)
    : options_(options),
      rank_(std::to_string(world.rank())),
      staging_(world.device(), MemoryKind::kStaging),
      host_({world.device(), options.pin_memory, options.host_limit_bytes}) {
  require(world.device().is_cpu() || options.params == options.grads,
          "FsdpOptions::offload has params = ", options.params ? "true" : "false",
          " and grads = ", options.grads ? "true" : "false", " on ", world.device().str(),
          ", expected both or neither: an optimizer needs parameters and gradients in one place");
  if (!options.directory.empty())
    disk_ = std::make_unique<DiskPager>(DiskPagerOptions{options.directory, options.disk_buffer_bytes});
  if (options.params || options.grads) copies_ = CopyEngine::make(world.device());
}

CountedBuffers::Memory OffloadedMemory::on_host(const char* purpose) {
  return [this, purpose](int64_t numel, at::ScalarType dtype) {
    return host_.take(numel, dtype, std::string(purpose) + " on rank " + rank_);
  };
}

CountedBuffers::Memory OffloadedMemory::shards(const std::string& unit) {
  if (!options_.params) return nullptr;
  if (!disk_ || (options_.disk_units && !options_.disk_units(unit))) return on_host("the shards");
  return [this, unit](int64_t numel, at::ScalarType dtype) {
    return disk_->make({numel}, {1}, dtype, "the shard of unit '" + unit + "' on rank " + rank_);
  };
}

void OffloadedMemory::report(MemoryReport& report) const {
  report.staging_bytes = staging_.lent_bytes();
  report.peak_staging_bytes = staging_.peak_lent_bytes();
  report.host_bytes = host_.lent_bytes();
  report.pinned_bytes = options_.pin_memory ? report.host_bytes : 0;
  if (!disk_) return;
  report.host_bytes += disk_->buffer_bytes();
  report.disk_bytes = disk_->disk_bytes();
}

}  // namespace tessera::internal
