#pragma once

#include <cstdint>

namespace tessera {

// A program that has planned says what a rank takes at the peak of a step, with optimizer and activations: while this
// lives, wrappers of this thread hold that against free memory, in place of what they can count themselves.
//
//   const PlannedMemoryScope planned(record.peak_bytes());  // of a dry_run()
//   auto model = zero(Gpt(config), options, comm, {.stage = 3});
class PlannedMemoryScope {
 public:
  explicit PlannedMemoryScope(int64_t peak_bytes);  // on the device that the wrapper will be on

  ~PlannedMemoryScope();
  PlannedMemoryScope(const PlannedMemoryScope&) = delete;
  PlannedMemoryScope& operator=(const PlannedMemoryScope&) = delete;

  static int64_t current();  // of this thread; 0: no plan

 private:
  const int64_t before_;
};

}  // namespace tessera
