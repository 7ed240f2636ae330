#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/trace/trace.h"

namespace tessera::internal {

// The steady clock of this host, in nanoseconds.
int64_t steady_now_ns();

// Returns the run of a group's traced ranks, with the offset of this rank's clock to the clock of the first traced
// rank.
//
// `clocks` has Trace::clock_id() by rank, or "" for a rank that is not traced. It must be equal on all ranks, and this
// rank must be traced. Hosts are compared, not ranks: the first traced rank of each other host asks the first traced
// rank for its clock. It asks eight times through the store, and keeps the fastest answer (Cristian's algorithm, NTP's
// filter). The reference read its clock between question and answer. So the midpoint of the two errs by at most half of
// the time between them, Run::error_ns. Later drift is not measured: NTP also adjusts the rate of a steady clock.
//
// Collective over the traced ranks. Takes about 32 messages for each other host, one host after another. Throws
// c10::Error, as the store does, if a rank is late. `now_ns` is for tests.
Trace::Run agree_on_traced_run(c10d::Store& store, int rank, const std::vector<std::string>& clocks,
                               const std::function<int64_t()>& now_ns = steady_now_ns);

}  // namespace tessera::internal
