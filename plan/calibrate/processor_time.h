#pragma once

#include <time.h>

namespace tessera::internal {

inline double seconds_of_clock(clockid_t clock) {
  timespec now{};
  ::clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}
// Returns the wall-clock time since an arbitrary moment.
inline double wall_clock_s() { return seconds_of_clock(CLOCK_MONOTONIC); }
// Return the processor time of the calling thread or of the whole process. Other programs do not affect this time.
inline double thread_processor_s() { return seconds_of_clock(CLOCK_THREAD_CPUTIME_ID); }
inline double process_processor_s() { return seconds_of_clock(CLOCK_PROCESS_CPUTIME_ID); }

}  // namespace tessera::internal
