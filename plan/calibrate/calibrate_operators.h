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
  std::map<std::string, OperatorSpeed> operators;  // of kernels in fp32, as MachineSpeed::operators
  // of each operator, outside its kernel: autograd, hooks, views, allocations
  double between_s = 0;
  double jitter = 0;  // MachineSpeed::jitter
};

// A timed call of a kernel.
struct TimedKernel {
  double flop, bytes, seconds;
};

// Returns the operator speed that fits its calls. Needs at least one call; each must have FLOP or bytes.
OperatorSpeed speed_through(const std::vector<TimedKernel>& kernels);

// For an even count, the larger middle value. Needs at least one value.
double median_of(std::vector<double> values);

// The collectives of one training step.
using TrainedCollectives = std::vector<RecordedCollective>;

// Trains small decoders of several widths and lengths on all ranks at once, and times each kernel inside a step, with
// the caches in the state of training. The busy time of unrecorded steps then gives `between_s` and the slowdown of
// kernels by recording, which is subtracted. `quick`: fewer decoders. `link`: the processor time of collectives, which
// makes all times processor time; null: wall-clock time. Collective; each rank gets its own result.
OperatorSpeeds measure_operators(const std::shared_ptr<Communicator>& comm, bool quick, const LinkSpeed* link,
                                 const std::vector<TrainedCollectives>& collectives);

// Returns the collectives in a step of each training of measure_operators() on this number of ranks. Uses dry runs, so
// it must be called before other threads create tensors.
std::vector<TrainedCollectives> collectives_of_trainings(int ranks, bool quick);

}  // namespace tessera::internal
