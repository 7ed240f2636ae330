#include "tessera/memory/buffer_pool.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "tessera/memory/memory_cache.h"

namespace tessera {

at::Tensor BufferPool::take(int64_t bytes) {
  std::lock_guard lock(mutex_);
  lent_bytes_ += bytes;
  peak_lent_bytes_ = std::max(peak_lent_bytes_, lent_bytes_);
  high_water_bytes_ = std::max(high_water_bytes_, lent_bytes_);
  if (auto same = idle_.find(bytes); same != idle_.end()) {
    at::Tensor buffer = std::move(same->second.back());
    same->second.pop_back();
    if (same->second.empty()) idle_.erase(same);
    idle_bytes_ -= bytes;
    return buffer;
  }
  while (!idle_.empty() && lent_bytes_ + idle_bytes_ > high_water_bytes_) {
    auto largest = std::prev(idle_.end());
    idle_bytes_ -= largest->first;
    largest->second.pop_back();
    if (largest->second.empty()) idle_.erase(largest);
  }
  // Buffers outlive an evaluation under InferenceMode, whose tensors could not be written later.
  c10::InferenceMode ordinary(false);
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device_));
}

void BufferPool::give(at::Tensor buffer) {
  std::lock_guard lock(mutex_);
  const int64_t bytes = buffer.numel();
  lent_bytes_ -= bytes;
  idle_bytes_ += bytes;
  idle_[bytes].push_back(std::move(buffer));
}

void BufferPool::trim() {
  std::lock_guard lock(mutex_);
  idle_.clear();
  idle_bytes_ = 0;
  if (device_.is_cpu()) release_freed_memory();
}

int64_t BufferPool::lent_bytes() const {
  std::lock_guard lock(mutex_);
  return lent_bytes_;
}

int64_t BufferPool::peak_lent_bytes() const {
  std::lock_guard lock(mutex_);
  return peak_lent_bytes_;
}

void BufferPool::reset_peak() {
  std::lock_guard lock(mutex_);
  peak_lent_bytes_ = lent_bytes_;
}

}  // namespace tessera
