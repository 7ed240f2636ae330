#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>

#include "core/memory/page_locked.h"

namespace tessera::accelerator {
using namespace internal;

c10::Allocator* device_allocator();
at::HostAllocator* pinned_allocator();
PageLockedAllocator* page_locked_memory();
// While it is alive, this thread allocates device memory from a pool registered with the group (ncclCommRegister).
class RegisteredScope {
 public:
  explicit RegisteredScope(int64_t group);
  ~RegisteredScope();

 private:
  const int64_t before_;
};
bool is_registered_with(const void* address, int64_t group);
// Returns the kernels' address of memory at this host address.
void* kernel_address(const void* address);
bool is_pinned(const void* address);
// The name of the writer of freed memory; only the simulation writes it.
inline constexpr char kGivenBack[] = "the allocator, to whom the memory was given back";
// Installs a handler that explains faults, or reports and passes over them: see Races::host_touched().
void watch_for_faults();
// Frees all memory of devices without tensors, and page-locked memory likewise. All streams must be idle.
void reclaim();

}  // namespace tessera::accelerator
