#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <tessera/communicator.h>
#include <tessera/plan/machine_speed.h>

namespace tessera::internal {

// What training steps show of a rank's operators.
struct OperatorSpeeds {
  std::map<std::string, OperatorSpeed> operators;  // of kernels in fp32, as MachineSpeed::operators
  double between_s = 0;                            // of each, outside its kernel: autograd, hooks, views, allocations
  double jitter = 0;                               // MachineSpeed::jitter
};

// A kernel's call.
struct TimedKernel {
  double flop, bytes, seconds;
};

// The speed of one operator that explains its calls. At least one; each with FLOP or bytes.
OperatorSpeed speed_through(const std::vector<TimedKernel>& kernels);

// Of two in the middle the larger. At least one value.
double median_of(std::vector<double> values);

// Of one step.
using TrainedCollectives = std::vector<RecordedCollective>;

// Trains small decoders of several widths and lengths on all ranks at once and takes each kernel's time where it stands
// in a step, with the caches as they are there. What unrecorded steps take, less their waits, then says `between_s`,
// and by how much recording has slowed kernels, which is taken off. Collective; each rank gets its own figures.
// `quick`: fewer decoders. `link`: what collectives take of processors, and all times are such; null: by the clock.
OperatorSpeeds measure_operators(const std::shared_ptr<Communicator>& comm, bool quick, const LinkSpeed* link,
                                 const std::vector<TrainedCollectives>& collectives);

// The collectives of a step of each training of measure_operators(), on so many ranks: from dry runs, before other
// threads make tensors.
std::vector<TrainedCollectives> collectives_of_trainings(int ranks, bool quick);

}  // namespace tessera::internal
