#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "core/memory/memory_kind_scope.h"

namespace tessera::internal {

// Lends uninitialised flat buffers and counts the bytes that are lent. It keeps none of them: on CPUs the
// MemoryCache gives a buffer's memory to the next one of its size, on accelerators libtorch's allocator does.
// Thread-safe; buffers may outlive it.
class CountedBuffers {
 public:
  // Makes a tensor [numel] on the device.
  using Memory = std::function<at::Tensor(int64_t numel, at::ScalarType dtype)>;
  // `kind` of all that it lends, which is made by `memory`; empty: by libtorch.
  CountedBuffers(at::Device device, MemoryKind kind, Memory memory = nullptr);

  // A buffer [numel], 64-byte aligned. Its bytes count until the last reference to its storage goes, on any thread; on
  // a device with streams, let go of it where the current stream is ordered after the last use.
  at::Tensor take(int64_t numel, at::ScalarType dtype);

  int64_t lent_bytes() const;
  int64_t peak_lent_bytes() const;  // since construction or reset_peak()
  void reset_peak();

 private:
  struct Counts;
  const at::Device device_;
  const MemoryKind kind_;
  const Memory memory_;
  const std::shared_ptr<Counts> counts_;  // shared with the buffers
};

}  // namespace tessera::internal
