#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "core/memory/memory_kind_scope.h"

namespace tessera::internal {

// Allocates uninitialised flat buffers and counts the bytes in use. Does not keep freed memory: the MemoryCache (CPU)
// or libtorch's allocator (accelerators) reuses it. Thread-safe; buffers may outlive this object.
class CountedBuffers {
 public:
  // Makes a tensor [numel] on the device.
  using Memory = std::function<at::Tensor(int64_t numel, at::ScalarType dtype)>;
  // `kind` is the MemoryKind of all buffers. `memory` allocates the buffers; if `memory` is empty, libtorch does.
  CountedBuffers(at::Device device, MemoryKind kind, Memory memory = nullptr);

  // Returns a buffer [numel], 64-byte aligned. Its bytes count until the last reference to its storage is destroyed, on
  // any thread. On a device with streams, that thread's current stream must then be ordered after the last use.
  at::Tensor take(int64_t numel, at::ScalarType dtype);

  int64_t lent_bytes() const;
  int64_t peak_lent_bytes() const;  // peak since construction or reset_peak()
  void reset_peak();

 private:
  struct Counts;
  const at::Device device_;
  const MemoryKind kind_;
  const Memory memory_;
  const std::shared_ptr<Counts> counts_;  // also owned by the buffers
};

}  // namespace tessera::internal
