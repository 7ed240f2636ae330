#pragma once

#include <cstdint>
#include <functional>

namespace tessera {

enum class CopyDirection : uint8_t { kToDevice, kToHost };

// How the link between host and device behaves where the device is the CPU itself, so that order,
// overlap and failures can be tried without an accelerator.
struct SimulatedLink {
  // A copy takes at least its bytes divided by this, each direction for itself. 0: no lower bound.
  double bytes_per_s = 0;
  // Called before each copy on the thread that makes it, one thread a direction: it may wait, which
  // holds back all later copies of that direction, and may throw, which makes the copy fail.
  std::function<void(CopyDirection direction, int64_t bytes)> before_copy;
};

}  // namespace tessera
