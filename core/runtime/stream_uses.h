#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <vector>

namespace tessera::internal {

// Makes an accelerator current on this thread; a no-op for a CPU. A thread of Tessera's must call this before it
// touches events or memory of the device. Otherwise CUDA makes a context on device 0, which takes hundreds of MiB
// there: libtorch makes a thread's device current again when it has recorded or destroyed an event, and new threads
// have device 0.
void make_current(c10::Device device);
// Returns an accelerator with an index: this thread's current device if `device` has none. A no-op for a CPU.
c10::Device with_index(c10::Device device);
// Returns the stream on which this thread's next operator runs on the device, which must have streams.
c10::Stream current_stream(c10::Device device);
// Makes later work of `then` wait for the current work of `first`. Does not block the host.
void order_streams(const c10::Stream& first, const c10::Stream& then);

// The streams that use one piece of device memory. Orders them with the fewest waits: readers run concurrently, and the
// next writer waits for all of them. A no-op on a CPU. Must be used by one thread at a time.
class StreamUses {
 public:
  // Must be called when the memory is filled, on the stream that fills it or that waits for the filling stream. A later
  // use() on another stream waits for the work enqueued so far.
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
