#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <tessera/plan/run_record.h>

namespace tessera::internal {

// One action of a rank: it called an operator, or started or awaited a collective.
struct StepAction {
  enum class Kind : uint8_t { kCompute, kStart, kWait } kind;
  size_t index;  // in RunRecord::operators if kCompute, otherwise in RunRecord::collectives
  int step;      // step of the action; 0: in the constructor
};

// Returns all actions of a record, in the rank's order.
std::vector<StepAction> actions_of(const RunRecord& record);

}  // namespace tessera::internal
