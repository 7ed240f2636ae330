#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <vector>

namespace tessera::internal {

// The stream on which this thread's next operator on the device runs. Of a device that has streams: not a CPU.
c10::Stream current_stream(c10::Device device);
// What `first` was given so far comes before what `then` is given from now on. The host does not wait.
void order_streams(const c10::Stream& first, const c10::Stream& then);

// The streams that use one piece of memory of a device, and their order: none waits that need not, and what comes next
// waits for all. On a CPU every call does nothing. Used by one thread at a time.
class StreamUses {
 public:
  // The current stream has made it or waited for it: other streams may use it after what was given to this one so far.
  void begin(c10::Device device);
  // The current stream is about to use it, beside others that do.
  void use();
  // The current stream is about to free it, or to change what others use: after all of them.
  void join();

 private:
  std::vector<c10::Stream> users_;
  std::shared_ptr<c10::Event> ready_;
};

}  // namespace tessera::internal
