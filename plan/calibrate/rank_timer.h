#pragma once

#include <functional>
#include <memory>
#include <string>

#include <tessera/communicator.h>
#include "plan/calibrate/calibrate.h"
#include "plan/calibrate/processor_time.h"

namespace tessera::internal {

// Measures the time of work that all ranks do concurrently, for calibration. Functions that measure or average are
// collective. Except for once_s(), these functions return the same value on all ranks.
class RankTimer {
 public:
  RankTimer(std::shared_ptr<Communicator> comm, const CalibrationOptions& options);  // borrows `options`

  const CalibrationOptions& options() const { return options_; }

  // Returns whether work_seconds_of() measures processor time. This is false for several threads per rank, because a
  // thread's clock does not include the rank's other threads.
  bool by_processor() const { return options_.threads == 1; }

  // On rank 0, calls CalibrationOptions::progress with the name of the next measurement. A no-op on other ranks.
  void say(const std::string& what) const;

  // Returns the slowest rank's median wall-clock time of repeated calls.
  double seconds_of(const std::function<void()>& call) const;

  // Returns this rank's wall-clock time of one call. All ranks start the call at the same time.
  double once_s(const std::function<void()>& call) const;
  double mean(double seconds) const { return over_ranks(seconds, ReduceOp::kAverage); }

  // Measures a call with `clock`. Returns the mean time over repeated calls and all ranks.
  double processor_seconds_of(const std::function<void()>& call, double (*clock)() = &thread_processor_s) const;

  // Returns processor_seconds_of() if by_processor(), otherwise seconds_of().
  double work_seconds_of(const std::function<void()>& call) const;

 private:
  double slowest(double seconds) const { return over_ranks(seconds, ReduceOp::kMax); }
  double over_ranks(double seconds, ReduceOp op) const;

  std::shared_ptr<Communicator> comm_;
  const CalibrationOptions& options_;
  double budget_s_;
};

}  // namespace tessera::internal
