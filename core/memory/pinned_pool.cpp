#include "core/memory/pinned_pool.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/memory/memory_kind_scope.h"
#include "core/memory/page_locked.h"
#include "core/runtime/guarded_by.h"
#include "core/runtime/require.h"

namespace tessera::internal {

struct PinnedPool::State {
  const PinnedPoolOptions options;
  mutable std::mutex mutex;
  std::map<int64_t, std::vector<at::Tensor>> idle TESSERA_GUARDED_BY(mutex);  // keyed by allocated bytes
  int64_t idle_bytes TESSERA_GUARDED_BY(mutex) = 0;
  int64_t lent_bytes TESSERA_GUARDED_BY(mutex) = 0;
  int64_t peak_lent_bytes TESSERA_GUARDED_BY(mutex) = 0;

  explicit State(PinnedPoolOptions chosen) : options(chosen) {}

  bool locks_pages() const { return options.pin && !options.device.is_cpu(); }

  at::Tensor take(int64_t bytes, const std::string& what) {
    std::lock_guard lock(mutex);
    if (options.limit_bytes > 0 && lent_bytes + bytes > options.limit_bytes)
      throw std::runtime_error(c10::str("host memory for ", what, ": ", bytes, " bytes asked for, ", lent_bytes,
                                        " lent, of at most ", options.limit_bytes, " (host_limit_bytes)"));
    at::Tensor memory;
    if (auto same = idle.find(bytes); same != idle.end()) {
      memory = std::move(same->second.back());
      drop_last(same);
    } else {
      const int64_t bound = std::max(peak_lent_bytes, lent_bytes + bytes);
      while (!idle.empty() && lent_bytes + bytes + idle_bytes > bound) drop_last(std::prev(idle.end()));
      memory = locks_pages() ? page_locked(bytes) : at::empty({bytes}, at::TensorOptions(at::kCPU).dtype(at::kByte));
    }
    lent_bytes += bytes;
    peak_lent_bytes = std::max(peak_lent_bytes, lent_bytes);
    return memory;
  }

  void drop_last(std::map<int64_t, std::vector<at::Tensor>>::iterator entry) {
    idle_bytes -= entry->first;
    entry->second.pop_back();
    if (entry->second.empty()) idle.erase(entry);
  }

  void give(at::Tensor memory, int64_t bytes) {
    std::lock_guard lock(mutex);
    lent_bytes -= bytes;
    if (!locks_pages()) return;  // the memory cache keeps unlocked memory
    idle_bytes += bytes;
    idle[bytes].push_back(std::move(memory));
  }
};

PinnedPool::PinnedPool(PinnedPoolOptions options) : state_(std::make_shared<State>(options)) {
  require(options.limit_bytes >= 0, "host_limit_bytes is ", options.limit_bytes, ", expected 0 or more");
}

at::Tensor PinnedPool::take(int64_t numel, at::ScalarType dtype, const std::string& what) {
  const int64_t asked_bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  const auto options = at::TensorOptions(at::kCPU).dtype(dtype);
  c10::InferenceMode ordinary(false);
  const MemoryKindScope kind(MemoryKind::kHost);
  if (asked_bytes == 0) return at::empty({0}, options);
  const int64_t bytes = state_->locks_pages() ? bytes_when_page_locked(asked_bytes) : asked_bytes;
  at::Tensor memory = state_->take(bytes, what);
  void* data = memory.mutable_data_ptr();
  auto return_memory = [state = state_, memory, bytes](void*) { state->give(memory, bytes); };
  return at::from_blob(data, {numel}, std::move(return_memory), options);
}

int64_t PinnedPool::lent_bytes() const {
  std::lock_guard lock(state_->mutex);
  return state_->lent_bytes;
}

int64_t PinnedPool::peak_lent_bytes() const {
  std::lock_guard lock(state_->mutex);
  return state_->peak_lent_bytes;
}

int64_t PinnedPool::owned_bytes() const {
  std::lock_guard lock(state_->mutex);
  return state_->lent_bytes + state_->idle_bytes;
}

}  // namespace tessera::internal
