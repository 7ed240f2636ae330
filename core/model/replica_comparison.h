#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include <tessera/communicator.h>
#include "core/layout/unit_plan.h"

namespace tessera::internal {

// Compares a checksum of every replicated parameter over all ranks, every N steps. A debugging aid that detects
// diverged replicas. If the comparison is off, count_step() is a no-op.
class ReplicaComparison {
 public:
  // `every` is the number of steps between comparisons. If 0, the environment variable TESSERA_DEBUG sets the number;
  // see steps_between_comparisons(). Throws std::invalid_argument for a negative number or an invalid variable.
  explicit ReplicaComparison(int64_t every);

  // Returns the number of steps between comparisons; 0 if the comparison is off. All ranks must have the same number.
  int64_t every() const { return every_; }

  // Counts a step. Every `every()`-th call is collective, blocks, and compares the parameters. If bits differ, throws
  // std::runtime_error on all ranks, naming the first unequal parameter and the ranks that differ from rank 0.
  void count_step(const std::vector<PlannedParameter>& parameters, Communicator& comm);

 private:
  const int64_t every_;
  int64_t steps_ = 0;
};

// Returns the sum, modulo 2^64, of the elements' bits as integers: an int64 scalar tensor on the tensor's device. A
// change of one bit changes the sum. Does not depend on strides.
at::Tensor checksum(const at::Tensor& tensor);

// Parses a value of TESSERA_DEBUG. Returns N for "replicas:N", 100 for "replicas", and 0 for null or "". Throws
// std::invalid_argument for any other text.
int64_t steps_between_comparisons(const char* debug);

}  // namespace tessera::internal
