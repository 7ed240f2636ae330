#pragma once

namespace tessera {

// Whether this thread is in the first forward of a checkpointed() call: autograd does not record
// it, but backward will compute it again and then ask for its parameters' gradients.
bool recomputes_later();

// Says so while it lives.
class RecomputesLater {
 public:
  RecomputesLater();
  ~RecomputesLater();
  RecomputesLater(const RecomputesLater&) = delete;
  RecomputesLater& operator=(const RecomputesLater&) = delete;

 private:
  const bool before_;
};

}  // namespace tessera
