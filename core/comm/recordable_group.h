#pragma once

#include <functional>
#include <string>

namespace tessera::internal {

// A group whose collectives can be part of recorded work (core/runtime/graph_recorder.h).
class RecordableGroup {
 public:
  virtual ~RecordableGroup() = default;
  // Returns "" if collectives can be recorded. Otherwise returns the reason, as text that follows "CapturedStep: ".
  virtual std::string why_not_recorded() const = 0;
  // Calls `enqueue`, which must enqueue recorded work on the current stream. The group then awaits and times that work
  // as an operation with this description. Throws CommError if the group is broken.
  virtual void enqueue_recorded(const std::string& description, const std::function<void()>& enqueue) = 0;
};

}  // namespace tessera::internal
