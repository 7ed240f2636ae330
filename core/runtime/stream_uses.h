#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <vector>

namespace tessera::internal {

// Makes an accelerator the current device of this thread; a no-op for a CPU. A thread that Tessera starts must call
// this before it uses events or memory of the device. A new thread's current device is 0, and libtorch makes that
// device current again after it records or destroys an event. CUDA would then make a context of hundreds of MiB there.
void make_current(c10::Device device);
// Returns `device` with an index: if an accelerator has none, the current device's. Returns a CPU unchanged.
c10::Device with_index(c10::Device device);
// Returns this thread's current stream on `device`, which must be an accelerator.
c10::Stream current_stream(c10::Device device);
// Makes later work of `then` wait for the current work of `first`. Does not block the host.
void order_streams(const c10::Stream& first, const c10::Stream& then);

// The streams that use one piece of device memory. Orders them with the fewest waits: readers run concurrently, and the
// next writer waits for all of them. A no-op on a CPU. Must be used by one thread at a time.
class StreamUses {
 public:
  // Must be called after the work that fills the memory was enqueued. The current stream must be the stream of that
  // work, or wait for it. A later use() on another stream waits for the work enqueued so far.
  void begin(c10::Device device);
  // Must be called before the current stream uses the memory; other users may run at the same time.
  void use();
  // Must be called before the memory is freed or overwritten. The current stream then waits for all users.
  void join();

 private:
  std::vector<c10::Stream> users_;
  std::shared_ptr<c10::Event> ready_;
};

}  // namespace tessera::internal
