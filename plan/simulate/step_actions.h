#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <tessera/plan/run_record.h>

namespace tessera::internal {

// One action of a rank: the call of an operator, or the start or wait of a collective.
struct StepAction {
  enum class Kind : uint8_t { kCompute, kStart, kWait } kind;
  size_t index;  // index in RunRecord::operators for kCompute, otherwise in RunRecord::collectives
  int step;      // number of the step; 0: the constructor
};

// Returns all actions of a record, in the order in which the rank made them.
std::vector<StepAction> actions_of(const RunRecord& record);

}  // namespace tessera::internal
