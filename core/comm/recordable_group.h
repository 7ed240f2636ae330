#pragma once

#include <functional>
#include <string>

namespace tessera::internal {

// A group whose collectives can be part of recorded work (core/runtime/graph_recorder.h).
class RecordableGroup {
 public:
  virtual ~RecordableGroup() = default;
  // Returns "" if collectives can be recorded, otherwise the reason why not, which callers append to "CapturedStep: ".
  virtual std::string why_not_recorded() const = 0;
  // Calls `enqueue`, which must enqueue recorded work on the current stream. The group then tracks this work as an
  // operation that is named `description`, so the work can time out. Throws CommError if the group is broken.
  virtual void enqueue_recorded(const std::string& description, const std::function<void()>& enqueue) = 0;
};

}  // namespace tessera::internal
