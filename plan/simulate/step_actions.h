#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <tessera/plan/run_record.h>

namespace tessera::internal {

// One thing that a rank did: called an operator, started a collective, or waited for one.
struct StepAction {
  enum class Kind : uint8_t { kCompute, kStart, kWait } kind;
  size_t index;  // of RunRecord::operators, or of its collectives
  int step;      // when it did that; 0: in the constructor
};

// All of a record, in the order in which the rank did it.
std::vector<StepAction> actions_of(const RunRecord& record);

}  // namespace tessera::internal
