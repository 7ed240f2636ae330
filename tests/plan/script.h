#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <tessera/plan/machine_speed.h>
#include <tessera/plan/run_record.h>

namespace tessera::plan_tests {
using namespace internal;

// 1 TFLOP/s, 1 GB/s of memory and link, no fixed costs: round numbers.
inline MachineSpeed plain() {
  MachineSpeed speed;
  speed.work[static_cast<size_t>(WorkClass::kMatmul)] = SpeedCurve::of_speed(1e12);
  speed.work[static_cast<size_t>(WorkClass::kMemory)] = SpeedCurve::of_speed(1e9);
  speed.within_host.bytes_per_s = 1e9;
  return speed;
}

// A record written in the order in which its rank would run.
struct Script {
  RunRecord record;
  int step = 1;

  void compute(double seconds) {  // with plain()
    RecordedOperator op{.name = "aten::mm", .step = step, .flop = static_cast<int64_t>(seconds * 1e12)};
    record.operators.push_back(op);
  }
  size_t start(const std::string& operation, int64_t bytes, int ranks = 2, std::vector<int> members = {}) {
    RecordedCollective collective{operation, "x", ranks, bytes, step, record.operators.size()};
    if (!members.empty()) collective.members = std::make_shared<const std::vector<int>>(std::move(members));
    record.collectives.push_back(collective);
    return record.collectives.size() - 1;
  }
  void wait(size_t collective) {
    record.collectives[collective].wait = {step, record.operators.size(), record.collectives.size()};
  }
};

inline constexpr int64_t kGB = 1'000'000'000;
inline constexpr double kExact = 1e-9;

}  // namespace tessera::plan_tests
