#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include <tessera/plan/run_record.h>

namespace tessera::plan_tests {
using namespace internal;

inline std::string difference(const BytesByKind& dry, const BytesByKind& real) {
  std::string text;
  for (size_t kind = 0; kind < static_cast<size_t>(MemoryKind::kTransport); ++kind)
    if (dry.bytes[kind] != real.bytes[kind])
      text += std::string(name_of(static_cast<MemoryKind>(kind))) + ": " + std::to_string(dry.bytes[kind]) +
              ", really " + std::to_string(real.bytes[kind]) + "; ";
  return text;
}

inline void expect_same(const RunRecord& dry, const RunRecord& real, const std::string& where) {
  for (size_t i = 0; i < std::min(dry.operators.size(), real.operators.size()); ++i) {
    const RecordedOperator &a = dry.operators[i], &b = real.operators[i];
    const std::string at = where + ", operator " + std::to_string(i) + ", " + b.name + ", step " +
                           std::to_string(b.step) + (b.in_backward ? ", in backward" : "");
    ASSERT_EQ(a.name, b.name) << at;
    ASSERT_EQ(difference(a.live, b.live), "") << at;
    ASSERT_EQ(a.flop, b.flop) << at;
    ASSERT_EQ(a.bytes, b.bytes) << at;
    ASSERT_EQ(a.dtype, b.dtype) << at;
    ASSERT_EQ(dry.units[a.unit], real.units[b.unit]) << at;
    ASSERT_EQ(dry.modules[a.module], real.modules[b.module]) << at;
  }
  EXPECT_EQ(dry.operators.size(), real.operators.size()) << where;
  EXPECT_EQ(difference(dry.peak, real.peak), "") << where << ", at the peak";
  EXPECT_EQ(difference(dry.most, real.most), "") << where << ", the most of each";
  EXPECT_EQ(difference(dry.end, real.end), "") << where << ", at the end";
  EXPECT_EQ(dry.peak_at, real.peak_at) << where;
}

}  // namespace tessera::plan_tests
