#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <tessera/communicator.h>
#include <tessera/plan/machine_speed.h>

namespace tessera::internal {

// A rank's operator speeds, measured in training steps.
struct OperatorSpeeds {
  std::map<std::string, OperatorSpeed> operators;  // fp32 kernels by name, as in MachineSpeed::operators
  // Seconds of an operator outside its kernel: autograd, hooks, views and allocations.
  double between_s = 0;
  double jitter = 0;  // value for MachineSpeed::jitter
};

// A timed call of a kernel.
struct TimedKernel {
  double flop, bytes, seconds;
};

// Returns the speed of an operator, fitted to its calls. Needs at least one call; each must have FLOP or bytes.
OperatorSpeed speed_through(const std::vector<TimedKernel>& kernels);

// Returns the median; for an even count, the larger of the two middle values. Needs at least one value.
double median_of(std::vector<double> values);

// The collectives of one training step.
using TrainedCollectives = std::vector<RecordedCollective>;

// Trains small decoders of several sizes on all ranks concurrently, and times each kernel inside a step, where caches
// are as in training. Recording slows kernels down: `between_s` and a correction of kernel times are fitted to the
// times of unrecorded steps. `quick`: fewer decoders. `link`: all times are processor time, without that of collectives
// over the link; null: wall-clock time. Is collective. Each rank gets its own result.
OperatorSpeeds measure_operators(const std::shared_ptr<Communicator>& comm, bool quick, const LinkSpeed* link,
                                 const std::vector<TrainedCollectives>& collectives);

// Returns the collectives of one step, for each training of measure_operators() on `ranks` ranks. Uses dry runs, so it
// must be called before other threads create tensors.
std::vector<TrainedCollectives> collectives_of_trainings(int ranks, bool quick);

}  // namespace tessera::internal
