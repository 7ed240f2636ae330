#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "core/runtime/copy_engine.h"
#include "core/runtime/stream_uses.h"

namespace tessera::internal {
namespace {

// Note [Streams of a copy]. The copy's stream first waits for the caller's current stream. So a copy runs after kernels
// that produce its source or still use its destination. The event `end_` is recorded on the copy's stream. A stream
// that has waited for the event may free or write the device memory. If no stream has waited before the StreamCopy is
// destroyed, its destructor makes the current stream wait. HostMemoryInUse keeps the host memory until `end_` is over.
class EventEnd : public CopyEnd {
 public:
  explicit EventEnd(const c10::Stream& stream) : event(stream.device_type()) { event.record(stream); }
  bool is_over() override { return event.query(); }
  void wait() override { event.synchronize(); }
  c10::Event event;
};

class StreamCopy : public Copy::Operation {
 public:
  StreamCopy(CopyDirection direction, at::Tensor to, at::Tensor from, const c10::Stream& stream,
             std::shared_ptr<HostMemoryInUse> in_use, std::shared_ptr<std::atomic<int64_t>> late_copies)
      : CopyOperation(std::move(to), std::move(from), std::move(late_copies)),
        direction_(direction),
        device_(stream.device()),
        in_use_(std::move(in_use)) {
    order_streams(current_stream(device_), stream);
    c10::InferenceMode quiet;
    c10::StreamGuard on_stream(stream);
    to_.copy_(from_, /*non_blocking=*/true);
    end_ = std::make_shared<EventEnd>(stream);
    use_ = in_use_->add(direction == CopyDirection::kToHost ? to_ : from_, end_);
  }
  ~StreamCopy() override {
    try {
      if (!is_ordered_) order_device();
    } catch (...) {  // NOLINT(bugprone-empty-catch): the device has failed; later calls report it
    }
  }

  void order() override {
    if (direction_ == CopyDirection::kToHost) return finish();
    order_device();
  }
  void order_device() override {
    note_wait(end_->is_over());
    end_->event.block(current_stream(device_));
    is_ordered_ = true;
  }
  void finish() override {
    note_wait(end_->is_over());
    end_->wait();
    in_use_->remove(use_);
    is_ordered_ = true;
  }

 private:
  const CopyDirection direction_;
  const at::Device device_;
  const std::shared_ptr<HostMemoryInUse> in_use_;
  std::shared_ptr<EventEnd> end_;
  int64_t use_ = 0;
  bool is_ordered_ = false;
};

class StreamCopyEngine : public CopyEngine {
 public:
  explicit StreamCopyEngine(at::Device device)
      : CopyEngine(device), in_(new_stream(device)), out_(new_stream(device)) {}
  ~StreamCopyEngine() override {
    try {
      in_.synchronize();
      out_.synchronize();
    } catch (...) {  // NOLINT(bugprone-empty-catch): the device has failed; later calls report it
    }
  }

 private:
  static c10::Stream new_stream(at::Device device) {
    return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  }
  Copy start(CopyDirection direction, at::Tensor to, at::Tensor from) override {
    return Copy(std::make_unique<StreamCopy>(direction, std::move(to), std::move(from),
                                             direction == CopyDirection::kToDevice ? in_ : out_, in_use(),
                                             late_copies()));
  }

  const c10::Stream in_, out_;
};

}  // namespace

std::unique_ptr<CopyEngine> make_stream_copy_engine(at::Device device) {
  return std::make_unique<StreamCopyEngine>(device);
}

}  // namespace tessera::internal
