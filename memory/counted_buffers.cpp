#include "tessera/memory/counted_buffers.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <mutex>

namespace tessera {

struct CountedBuffers::Counts {
  std::mutex mutex;
  int64_t lent_bytes = 0;
  int64_t peak_lent_bytes = 0;

  void add(int64_t bytes) {
    std::lock_guard lock(mutex);
    lent_bytes += bytes;
    peak_lent_bytes = std::max(peak_lent_bytes, lent_bytes);
  }
};

CountedBuffers::CountedBuffers(at::Device device) : device_(device), counts_(std::make_shared<Counts>()) {}

at::Tensor CountedBuffers::take(int64_t numel, at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype).device(device_);
  // Buffers outlive an evaluation under InferenceMode, whose tensors could not be written later.
  c10::InferenceMode ordinary(false);
  at::Tensor memory = at::empty({numel}, options);
  if (numel == 0) return memory;
  const auto bytes = static_cast<int64_t>(memory.nbytes());
  counts_->add(bytes);
  void* data = memory.mutable_data_ptr();
  auto give_back = [counts = counts_, memory = std::move(memory), bytes](void*) mutable {
    memory.reset();
    counts->add(-bytes);
  };
  return at::from_blob(data, {numel}, std::move(give_back), options);
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

}  // namespace tessera
