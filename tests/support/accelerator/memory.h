#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>

#include "core/memory/page_locked.h"

namespace tessera::accelerator {
using namespace internal;

c10::Allocator* device_allocator();
at::HostAllocator* pinned_allocator();
PageLockedAllocator* page_locked_memory();
// While it lives, this thread's device memory comes from a pool that is registered with the group (ncclCommRegister).
class RegisteredScope {
 public:
  explicit RegisteredScope(int64_t group);
  ~RegisteredScope();

 private:
  const int64_t before_;
};
bool is_registered_with(const void* address, int64_t group);
// Where kernels reach what the host knows by this address.
void* kernel_address(const void* address);
bool is_pinned(const void* address);
// What writes to memory that is given back, for the simulation's sake alone.
inline constexpr char kGivenBack[] = "the allocator, to whom the memory was given back";
// Has faults explained, or noted and passed over: see Races::host_touched().
void watch_for_faults();
// With all streams idle: memory of devices on which no tensor is left, and page-locked memory likewise, is as never
// taken.
void reclaim();

}  // namespace tessera::accelerator
