#pragma once

#include <functional>
#include <memory>
#include <string>

#include <tessera/communicator.h>
#include "plan/calibrate/calibrate.h"
#include "plan/calibrate/processor_time.h"

namespace tessera::internal {

// Times work that all ranks do concurrently, for calibration. Except for say(), functions are collective and, except
// for once_s(), return equal values on all ranks.
class RankTimer {
 public:
  RankTimer(std::shared_ptr<Communicator> comm, const CalibrationOptions& options);  // keeps a reference to options

  const CalibrationOptions& options() const { return options_; }

  // Returns whether seconds are the thread's processor time. False with several threads a rank, as a thread's clock
  // does not include the others.
  bool by_processor() const { return options_.threads == 1; }

  // Reports the next measurement to rank 0's caller.
  void say(const std::string& what) const;

  // Returns the slowest rank's median wall-clock time of repeated calls.
  double seconds_of(const std::function<void()>& call) const;

  // Returns this rank's time of one call, which all ranks start together.
  double once_s(const std::function<void()>& call) const;
  double mean(double seconds) const;  // over all ranks

  // Returns the mean time by `clock` of repeated calls, over calls and ranks.
  double processor_seconds_of(const std::function<void()>& call, double (*clock)() = &thread_processor_s) const;

  // processor_seconds_of() if by_processor(), otherwise seconds_of().
  double work_seconds_of(const std::function<void()>& call) const;

 private:
  double slowest(double seconds) const;

  std::shared_ptr<Communicator> comm_;
  const CalibrationOptions& options_;
  double budget_s_;
};

}  // namespace tessera::internal
