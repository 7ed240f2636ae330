#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>

#include "core/memory/page_locked.h"

namespace tessera::accelerator {
using namespace internal;

c10::Allocator* device_allocator();
at::HostAllocator* pinned_allocator();
PageLockedAllocator* page_locked_memory();
// For its lifetime, this thread allocates device memory from a pool registered with the group (ncclCommRegister).
class RegisteredScope {
 public:
  explicit RegisteredScope(int64_t group);
  ~RegisteredScope();

 private:
  const int64_t before_;
};
bool is_registered_with(const void* address, int64_t group);
// Returns the address at which kernels access the memory at a host address.
void* kernel_address(const void* address);
bool is_pinned(const void* address);
// The name of the simulation's write to freed memory, in reports of races.
inline constexpr char kGivenBack[] = "the allocator, to whom the memory was given back";
// Installs a signal handler for faults: reports a race and continues (Races::host_touched()), or explains the fault.
void watch_for_faults();
// Frees the memory of each device without tensors, and page-locked memory without tensors. All streams must be idle.
void reclaim();

}  // namespace tessera::accelerator
