#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <tessera/communicator.h>
#include <tessera/plan/machine_speed.h>

namespace tessera::internal {

// Operator speeds of one rank, measured in training steps.
struct OperatorSpeeds {
  std::map<std::string, OperatorSpeed> operators;  // value for MachineSpeed::operators
  // The time in seconds of an operator outside its kernel, such as autograd, hooks, views and allocations.
  double between_s = 0;
  double jitter = 0;  // value for MachineSpeed::jitter
};

struct TimedKernel {
  double flop, bytes, seconds;
};

// Returns an operator's speed, fitted to its timed calls. `kernels` must not be empty; each must have FLOP or bytes.
OperatorSpeed speed_through(const std::vector<TimedKernel>& kernels);

// Returns the median; of an even count, the larger of the two middle values. `values` must not be empty.
double median_of(std::vector<double> values);

// The collectives of one training step.
using TrainedCollectives = std::vector<RecordedCollective>;

// Trains small decoders of several sizes (fewer if `quick`) on all ranks concurrently. Times each kernel inside a step,
// where caches are in the same state as in training. Because recording slows kernels down, fits `between_s` and a
// correction factor to the times of unrecorded steps. If `link` is null, measures wall-clock time. Otherwise, measures
// processor time less that of `collectives` (collectives_of_trainings()) on `link`. Collective. Results differ by rank.
OperatorSpeeds measure_operators(const std::shared_ptr<Communicator>& comm, bool quick, const LinkSpeed* link,
                                 const std::vector<TrainedCollectives>& collectives);

// Returns the collectives of one step for each training of measure_operators() with `ranks` ranks. Must be called
// before other threads create tensors, because it makes dry runs.
std::vector<TrainedCollectives> collectives_of_trainings(int ranks, bool quick);

}  // namespace tessera::internal
