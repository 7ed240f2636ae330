#pragma once

#include <utility>

namespace tessera {

// While one lives, this thread is in the first forward of a checkpointed() call: autograd does not record it, but
// backward will compute it again and then ask for its parameters' gradients.
class RecomputesLater {
 public:
  RecomputesLater() = default;
  ~RecomputesLater() { in_effect_ = before_; }
  RecomputesLater(const RecomputesLater&) = delete;
  RecomputesLater& operator=(const RecomputesLater&) = delete;
  static bool in_effect() { return in_effect_; }

 private:
  static inline thread_local bool in_effect_ = false;
  const bool before_ = std::exchange(in_effect_, true);
};

}  // namespace tessera
