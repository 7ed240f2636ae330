#pragma once

#include <cstdint>

namespace tessera {

// Sets the memory of a planned training step on one rank, including optimizer and activations. While an object of this
// class exists, wrappers on this thread compare free memory with the planned memory instead of their own estimate.
//
//   const PlannedMemoryScope planned(record.peak_bytes());  // of a dry_run()
//   auto model = zero(Gpt(config), options, comm, {.stage = 3});
class PlannedMemoryScope {
 public:
  explicit PlannedMemoryScope(int64_t peak_bytes);  // peak of the step on the wrapper's device, in bytes

  ~PlannedMemoryScope();
  PlannedMemoryScope(const PlannedMemoryScope&) = delete;
  PlannedMemoryScope& operator=(const PlannedMemoryScope&) = delete;

  static int64_t current();  // peak_bytes of this thread's innermost object; 0 if none

 private:
  const int64_t before_;
};

}  // namespace tessera
