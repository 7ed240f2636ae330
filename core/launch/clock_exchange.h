#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/trace/trace.h"

namespace tessera::internal {

// Returns the time of this host's steady clock, in nanoseconds.
int64_t steady_now_ns();

// Agrees on the Trace::Run of a group's traced ranks. Returns the run with the offset of this rank's clock to the clock
// of the first traced rank.
//
// `clocks` holds the Trace::clock_id() of each rank, or "" for an untraced rank. All ranks must pass equal `clocks`,
// and this rank must be traced. The reference is the first traced rank. On each other host, the first traced rank asks
// for the reference's time eight times through the store. The fastest answer counts (Cristian's algorithm, NTP's
// filter). The asking rank assumes that the reference read its clock midway between question and answer. The error is
// at most half of the time between them, Run::error_ns. Later drift is not measured: NTP keeps it small.
//
// Collective over the traced ranks. Needs about 32 messages for each other host, one host after another. If a rank is
// late, throws c10::Error, as the store does. `now_ns` replaces the clock in tests.
Trace::Run agree_on_traced_run(c10d::Store& store, int rank, const std::vector<std::string>& clocks,
                               const std::function<int64_t()>& now_ns = steady_now_ns);

}  // namespace tessera::internal
