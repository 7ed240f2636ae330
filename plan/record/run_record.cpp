#include <tessera/plan/run_record.h>

#include <iomanip>
#include <map>
#include <sstream>

#include "plan/report/quantity_text.h"

namespace tessera {
using namespace internal;

int64_t BytesByKind::tensors() const {
  int64_t sum = 0;
  for (size_t kind = 0; kind < kMemoryKinds; ++kind)
    if (is_tensors(static_cast<MemoryKind>(kind))) sum += bytes[kind];
  return sum;
}

std::string name_of_step(int step) { return step == 0 ? "constructor" : "step " + std::to_string(step); }

std::string RunRecord::peak_place() const {
  if (operators.empty()) return "";
  const RecordedOperator& at = operators[peak_at];
  return (at.step == 0 ? "the " : "") + name_of_step(at.step) + (at.in_backward ? ", in backward" : "") + ", at " +
         at.name + (at.unit == 0 ? "" : " of " + units[static_cast<size_t>(at.unit)]) +
         (at.module == 0 ? "" : ", in " + modules[static_cast<size_t>(at.module)]);
}

int64_t RunRecord::collective_bytes(int step) const {
  int64_t bytes = 0;
  for (const RecordedCollective& collective : collectives)
    if (collective.step == step) bytes += collective.bytes;
  return bytes;
}

std::string RunRecord::summary() const {
  std::ostringstream text;
  text << std::fixed;
  const ByteUnit unit = unit_for(peak_bytes());
  const auto put = [&](int64_t bytes, int width = 0) {
    text << std::setprecision(3) << std::setw(width) << static_cast<double>(bytes) / unit.bytes << " " << unit.name;
  };
  text << "peak ";
  put(peak_bytes());
  if (!operators.empty()) text << ", in " << peak_place();
  text << ":\n";
  for (size_t kind = 0; kind < kMemoryKinds; ++kind) {
    if (peak.bytes[kind] <= 0) continue;
    text << "  " << std::left << std::setw(13) << name_of(static_cast<MemoryKind>(kind)) << std::right;
    put(peak.bytes[kind], 12);
    text << "\n";
  }
  const int last = operators.empty() ? 0 : operators.back().step;
  const bool is_tera = flop >= 1e11;
  text << std::setprecision(4) << static_cast<double>(flop) * (is_tera ? 1e-12 : 1e-9)
       << (is_tera ? " TFLOP a step\n" : " GFLOP a step\n");
  std::map<std::string, std::pair<int64_t, int64_t>> by_operation;
  for (const RecordedCollective& collective : collectives) {
    if (collective.step != last) continue;
    ++by_operation[collective.operation].first;
    by_operation[collective.operation].second += collective.bytes;
  }
  for (const auto& [operation, total] : by_operation) {
    text << "  " << total.first << " x " << operation << ", ";
    put(total.second);
    text << "\n";
  }
  for (const std::string& stand_in : stand_ins) text << "0 stands for a value that was asked for: " << stand_in << "\n";
  return text.str();
}

}  // namespace tessera
