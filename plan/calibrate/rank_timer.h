#pragma once

#include <functional>
#include <memory>
#include <string>

#include <tessera/communicator.h>
#include "plan/calibrate/calibrate.h"
#include "plan/calibrate/processor_time.h"

namespace tessera::internal {

// Times work that all ranks do concurrently, for calibration. Functions that measure or average are collective. They
// return equal values on all ranks, except once_s().
class RankTimer {
 public:
  RankTimer(std::shared_ptr<Communicator> comm, const CalibrationOptions& options);  // borrows `options`

  const CalibrationOptions& options() const { return options_; }

  // Returns whether work_seconds_of() measures processor time. False with several threads a rank, because a thread's
  // clock does not include the rank's other threads.
  bool by_processor() const { return options_.threads == 1; }

  // On rank 0, calls CalibrationOptions::progress with the name of the next measurement. A no-op on other ranks.
  void say(const std::string& what) const;

  // Returns the median wall-clock time of repeated calls, on the slowest rank.
  double seconds_of(const std::function<void()>& call) const;

  // Returns this rank's wall-clock time of one call, which all ranks start together.
  double once_s(const std::function<void()>& call) const;
  double mean(double seconds) const;  // the mean over all ranks

  // Returns the mean time of a call by `clock`, over repeated calls and all ranks.
  double processor_seconds_of(const std::function<void()>& call, double (*clock)() = &thread_processor_s) const;

  // Returns processor_seconds_of() if by_processor(), otherwise seconds_of().
  double work_seconds_of(const std::function<void()>& call) const;

 private:
  double slowest(double seconds) const;

  std::shared_ptr<Communicator> comm_;
  const CalibrationOptions& options_;
  double budget_s_;
};

}  // namespace tessera::internal
