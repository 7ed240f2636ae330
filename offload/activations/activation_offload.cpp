#include <tessera/activation_offload.h>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "core/memory/pinned_pool.h"
#include "core/runtime/copy_engine.h"
#include "core/runtime/graph_recorder.h"
#include "core/runtime/lazy_values.h"
#include "core/runtime/stream_uses.h"

namespace tessera {
using namespace internal;

static constexpr size_t kMaxLeaving = 2;

// Frees `device`, a tensor on the device `home`. The current stream must already be ordered after copies of the tensor.
// Records this stream as a user of the memory, because another stream may have allocated it.
static void free_on_device(at::Tensor& device, at::Device home) {
  if (device.defined() && !home.is_cpu()) device.record_stream(current_stream(home));
  device.reset();
}

// Holds the kept tensors, and copies them to the host and back. ActivationOffload and all Fetches own it. Thread-safe.
class ActivationOffload::Pipeline : public std::enable_shared_from_this<Pipeline> {
 public:
  Pipeline(at::Device device, ActivationOffloadOptions options)
      : device_type_(device.type()),
        options_(options),
        pool_({device, options_.pin_memory, options_.host_limit_bytes}),
        copies_(CopyEngine::make(device)) {}

  Fetch keep(const at::Tensor& tensor);
  int64_t host_bytes() const { return pool_.lent_bytes(); }
  CopyTraffic traffic() const { return copies_->traffic(); }

 private:
  struct Kept;
  at::Tensor fetch(Kept& kept);
  void start_fetch(Kept& kept);
  void forget(Kept& kept);

  const at::DeviceType device_type_;
  const ActivationOffloadOptions options_;
  std::mutex mutex_;
  PinnedPool pool_;
  const std::unique_ptr<CopyEngine> copies_;
  std::deque<std::shared_ptr<Kept>> leaving_;  // tensors with a copy to the host in flight, oldest first
  std::shared_ptr<Kept> latest_;               // the newest kept tensor that still exists
};

// A kept tensor: a node of a list in the order of forward. Backward walks the list from its end.
struct ActivationOffload::Pipeline::Kept {
  std::vector<int64_t> sizes, strides;
  at::Tensor host;    // flat; the values in host memory
  at::Tensor device;  // flat; undefined while only the host has the values, and after each fetch
  at::Device home = at::kCPU;
  Copy copy;
  bool is_leaving = true;
  std::weak_ptr<Kept> before;
};

ActivationOffload::ActivationOffload(at::Device device, ActivationOffloadOptions options)
    : pipeline_(std::make_shared<Pipeline>(device, options)) {}

ActivationOffload::~ActivationOffload() = default;

static thread_local ActivationOffload* current_offload = nullptr;

ActivationOffload::Scope::Scope(ActivationOffload& activations)
    : before_(std::exchange(current_offload, &activations)) {}
ActivationOffload::Scope::~Scope() { current_offload = before_; }
ActivationOffload* ActivationOffload::current() { return current_offload; }

ActivationOffload::Fetch ActivationOffload::keep(const at::Tensor& tensor) { return pipeline_->keep(tensor); }
int64_t ActivationOffload::host_bytes() const { return pipeline_->host_bytes(); }
CopyTraffic ActivationOffload::traffic() const { return pipeline_->traffic(); }

ActivationOffload::Fetch ActivationOffload::Pipeline::keep(const at::Tensor& tensor) {
  if (tensor.device().type() != device_type_ || tensor.layout() != at::kStrided ||
      static_cast<int64_t>(tensor.nbytes()) < options_.min_bytes || tensor.numel() == 0)
    return {};
  CapturedWork::refuse(tensor.device(), "ActivationOffload, whose copies the host awaits", "use checkpointed() alone");
  std::lock_guard lock(mutex_);
  at::NoGradGuard no_grad;
  auto kept = std::make_shared<Kept>();
  // A copy engine copies bytes, so lazy values become ordinary ones first.
  const at::Tensor own = has_lazy_values(tensor) ? tensor.detach().clone() : tensor.detach();
  const at::Tensor dense = own.is_non_overlapping_and_dense() ? own : own.contiguous();
  kept->sizes = dense.sizes().vec();
  kept->strides = dense.strides().vec();
  kept->home = tensor.device();
  kept->device = dense.as_strided({dense.numel()}, {1});
  kept->host = pool_.take(dense.numel(), dense.scalar_type(), "an activation of shape " + c10::str(tensor.sizes()));
  kept->copy = copies_->to_host(kept->host, kept->device);
  kept->before = latest_;
  latest_ = kept;
  leaving_.push_back(kept);
  for (; leaving_.size() > kMaxLeaving; leaving_.pop_front()) {
    Kept& oldest = *leaving_.front();
    if (!std::exchange(oldest.is_leaving, false)) continue;
    oldest.copy.wait_on_device();
    oldest.copy = Copy();  // the handle holds device memory
    free_on_device(oldest.device, oldest.home);
  }
  const std::shared_ptr<Kept> held(kept.get(), [owner = shared_from_this(), kept](Kept*) { owner->forget(*kept); });
  return [owner = shared_from_this(), held] { return owner->fetch(*held); };
}

void ActivationOffload::Pipeline::start_fetch(Kept& kept) {
  if (std::exchange(kept.is_leaving, false)) kept.copy.wait_on_device();  // the device memory is not freed yet
  if (kept.device.defined() || !kept.host.defined()) return;
  kept.device = at::empty({kept.host.numel()}, kept.host.options().device(kept.home).pinned_memory(false));
  kept.copy = copies_->to_device(kept.device, kept.host);
}

at::Tensor ActivationOffload::Pipeline::fetch(Kept& kept) {
  std::lock_guard lock(mutex_);
  at::NoGradGuard no_grad;
  start_fetch(kept);
  kept.copy.wait_on_device();
  kept.copy = Copy();                                                             // the handle holds device memory
  if (!kept.home.is_cpu()) kept.device.record_stream(current_stream(kept.home));  // another stream may own the memory
  const at::Tensor values = std::exchange(kept.device, at::Tensor()).as_strided(kept.sizes, kept.strides);
  if (auto next = kept.before.lock()) start_fetch(*next);
  return values;
}

// Frees a kept tensor. Called when the last copy of its Fetch is destroyed, usually with the autograd graph.
void ActivationOffload::Pipeline::forget(Kept& kept) {
  std::lock_guard lock(mutex_);
  kept.copy = Copy();
  free_on_device(kept.device, kept.home);
  kept.host.reset();
  kept.is_leaving = false;
  if (latest_.get() == &kept) latest_ = kept.before.lock();
}

}  // namespace tessera
