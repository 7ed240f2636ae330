#pragma once

#include <functional>
#include <memory>
#include <string>

#include <tessera/communicator.h>
#include "plan/calibrate/calibrate.h"
#include "plan/calibrate/processor_time.h"

namespace tessera::internal {

// Times what all ranks do in step, for calibration. Everything but say() is collective, and all ranks get the same, but
// of once_s().
class RankTimer {
 public:
  RankTimer(std::shared_ptr<Communicator> comm, const CalibrationOptions& options);  // which it keeps a reference to

  const CalibrationOptions& options() const { return options_; }

  // Whether seconds are the thread's processor's. A thread that is one of several in a rank does not know what the
  // others have had.
  bool by_processor() const { return options_.threads == 1; }

  // Tells rank 0's caller what is measured next.
  void say(const std::string& what) const;

  // Of calls that all ranks make as often, by the clock: the slowest rank's median.
  double seconds_of(const std::function<void()>& call) const;

  // One call, which all ranks begin together, on this rank.
  double once_s(const std::function<void()>& call) const;
  double mean(double seconds) const;  // of all ranks'

  // Of calls that all ranks make as often: what each has had of what `clock` counts, in the mean of calls and ranks.
  double processor_seconds_of(const std::function<void()>& call, double (*clock)() = &thread_processor_s) const;

  // The latter where by_processor(), else the former.
  double work_seconds_of(const std::function<void()>& call) const;

 private:
  double slowest(double seconds) const;

  std::shared_ptr<Communicator> comm_;
  const CalibrationOptions& options_;
  double budget_s_;  // of one measurement
};

}  // namespace tessera::internal
