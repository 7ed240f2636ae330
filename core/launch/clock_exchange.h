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

// Returns the run of a group's traced ranks, with the offset of this rank's clock to the clock of the first traced
// rank.
//
// `clocks` holds the Trace::clock_id() of each rank, or "" for an untraced rank. All ranks must pass equal `clocks`,
// and this rank must be traced. The reference is the first traced rank. On each other host, the first traced rank asks
// the reference for its clock eight times through the store. The fastest answer counts (Cristian's algorithm, NTP's
// filter). The reference reads its clock between question and answer. So the midpoint of both times is wrong by at most
// half of the time between them, Run::error_ns. Later drift is not measured: NTP also adjusts a steady clock's rate.
//
// Collective over the traced ranks. Takes about 32 messages for each other host, one host after another. Throws
// c10::Error, as the store does, if a rank is late. `now_ns` is for tests.
Trace::Run agree_on_traced_run(c10d::Store& store, int rank, const std::vector<std::string>& clocks,
                               const std::function<int64_t()>& now_ns = steady_now_ns);

}  // namespace tessera::internal
