#include "core/memory/page_locked.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <unistd.h>

#include <atomic>
#include <bit>

namespace tessera::internal {

static std::atomic<PageLockedAllocator*> chosen_page_locked_allocator = nullptr;

PageLockedAllocator* page_locked_allocator() {
  PageLockedAllocator* const chosen = chosen_page_locked_allocator;
  return chosen != nullptr ? chosen : cuda_page_locked_allocator();
}

void set_page_locked_allocator(PageLockedAllocator* allocator) { chosen_page_locked_allocator = allocator; }

int64_t bytes_when_page_locked(int64_t bytes) {
  static const int64_t page_bytes = ::sysconf(_SC_PAGESIZE);
  const int64_t in_pages = (bytes + page_bytes - 1) / page_bytes * page_bytes;
  return page_locked_allocator() != nullptr ? in_pages
                                            : static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(in_pages)));
}

at::Tensor page_locked(int64_t bytes) {
  c10::InferenceMode ordinary(false);
  const auto options = at::TensorOptions().dtype(at::kByte).device(at::kCPU);
  PageLockedAllocator* const allocator = page_locked_allocator();
  if (allocator == nullptr || bytes == 0) return at::empty({bytes}, options.pinned_memory(bytes > 0));
  void* const memory = allocator->allocate(static_cast<size_t>(bytes));
  return at::from_blob(memory, {bytes}, [allocator](void* given) { allocator->free(given); }, options);
}

}  // namespace tessera::internal
