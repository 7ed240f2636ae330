#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "tessera/offload/copy_engine.h"

namespace tessera {
namespace {

c10::Event event_of(at::Device device) { return c10::Event(device.type()); }

// Note [Streams of a copy]. `ready` is recorded on the caller's stream and blocks the copy's, so that
// a copy never overtakes the kernels that produce what it reads, or that still use the memory that
// it writes. `done` is recorded on the copy's stream. Memory goes back to a pool only after the
// caller's stream, or the host, has waited for `done`; so the allocator needs no record of streams.
class StreamCopy : public Copy::Operation {
 public:
  StreamCopy(CopyDirection direction, at::Tensor to, at::Tensor from, const c10::Stream& stream,
             std::shared_ptr<std::atomic<int64_t>> late_copies)
      : direction_(direction),
        to_(std::move(to)),
        from_(std::move(from)),
        done_(event_of(stream.device())),
        late_copies_(std::move(late_copies)) {
    const c10::impl::VirtualGuardImpl guard(stream.device_type());
    c10::Event ready = event_of(stream.device());
    ready.record(guard.getStream(stream.device()));
    ready.block(stream);
    c10::InferenceMode quiet;
    c10::StreamGuard on_stream(stream);
    to_.copy_(from_, /*non_blocking=*/true);
    done_.record(stream);
  }
  ~StreamCopy() override {
    try {
      done_.synchronize();  // an exception is unwinding, perhaps: the memory must not go before
    } catch (...) {         // NOLINT(bugprone-empty-catch): the device has failed, and says so elsewhere
    }
  }

  void order() override {
    note_if_late();
    if (direction_ == CopyDirection::kToHost) return done_.synchronize();
    const at::Device device = to_.device();
    done_.block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
  void finish() override {
    note_if_late();
    done_.synchronize();
  }

 private:
  void note_if_late() {
    if (!std::exchange(is_noted_, true) && !done_.query()) ++*late_copies_;
  }

  const CopyDirection direction_;
  at::Tensor to_, from_;
  c10::Event done_;
  std::shared_ptr<std::atomic<int64_t>> late_copies_;
  bool is_noted_ = false;
};

class StreamCopyEngine : public CopyEngine {
 public:
  explicit StreamCopyEngine(at::Device device)
      : CopyEngine(device),
        in_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
        out_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true)) {}
  ~StreamCopyEngine() override {
    try {
      in_.synchronize();
      out_.synchronize();
    } catch (...) {  // NOLINT(bugprone-empty-catch): as above
    }
  }

 private:
  Copy start(CopyDirection direction, at::Tensor to, at::Tensor from) override {
    return Copy(std::make_unique<StreamCopy>(direction, std::move(to), std::move(from),
                                             direction == CopyDirection::kToDevice ? in_ : out_, late_copies()));
  }

  const c10::Stream in_, out_;
};

}  // namespace

std::unique_ptr<CopyEngine> make_stream_copy_engine(at::Device device) {
  return std::make_unique<StreamCopyEngine>(device);
}

}  // namespace tessera
