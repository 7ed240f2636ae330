#include "core/memory/counted_buffers.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>

#include "core/runtime/guarded_by.h"
#include "core/runtime/stream_uses.h"

namespace tessera::internal {

struct CountedBuffers::Counts {
  std::mutex mutex;
  int64_t lent_bytes TESSERA_GUARDED_BY(mutex) = 0;
  int64_t peak_lent_bytes TESSERA_GUARDED_BY(mutex) = 0;

  void add(int64_t bytes) {
    std::lock_guard lock(mutex);
    lent_bytes += bytes;
    peak_lent_bytes = std::max(peak_lent_bytes, lent_bytes);
  }
};

CountedBuffers::CountedBuffers(at::Device device, MemoryKind kind, Memory memory)
    : device_(device), kind_(kind), memory_(std::move(memory)), counts_(std::make_shared<Counts>()) {}

at::Tensor CountedBuffers::take(int64_t numel, at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype).device(device_);
  // Inference tensors cannot be written outside InferenceMode, so buffers must be ordinary tensors.
  c10::InferenceMode ordinary(false);
  const MemoryKindScope kind(kind_);
  at::Tensor memory = memory_ ? memory_(numel, dtype) : at::empty({numel}, options);
  if (numel == 0) return memory;
  const auto bytes = static_cast<int64_t>(memory.nbytes());
  counts_->add(bytes);
  void* data = memory.mutable_data_ptr();
  // libtorch's allocator reuses memory on the stream that allocated it, so that stream must wait for the last use.
  std::optional<c10::Stream> made_on;
  if (!device_.is_cpu()) made_on = current_stream(memory.device());
  auto free_memory = [counts = counts_, memory = std::move(memory), bytes, made_on](void*) mutable {
    if (made_on) order_streams(current_stream(made_on->device()), *made_on);
    memory.reset();
    counts->add(-bytes);
  };
  return at::from_blob(data, {numel}, std::move(free_memory), options);
}

int64_t CountedBuffers::lent_bytes() const {
  std::lock_guard lock(counts_->mutex);
  return counts_->lent_bytes;
}

int64_t CountedBuffers::peak_lent_bytes() const {
  std::lock_guard lock(counts_->mutex);
  return counts_->peak_lent_bytes;
}

void CountedBuffers::reset_peak() {
  std::lock_guard lock(counts_->mutex);
  counts_->peak_lent_bytes = counts_->lent_bytes;
}

}  // namespace tessera::internal
