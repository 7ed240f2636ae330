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

// The run that the traced ranks of a group are in, and how this rank's clock stands to that of the first of them.
//
// `clocks` has, by rank, Trace::clock_id(), or "" where a rank is not traced; the same on all ranks, and this rank's is
// not "". Hosts are compared, not ranks: the first traced rank of each other host asks the first of all what its clock
// shows, eight times through the store, and keeps the answer that took the shortest (Cristian's algorithm, and NTP's
// filter). It was read between the question and the answer, so that taking the middle errs by half of that time at
// most: Run::error_ns. Clocks that later run at different speeds are not seen; NTP steers that of a steady clock too.
//
// Collective over the traced ranks. Takes about eight times four messages for each other host, one host after
// another. Throws as the store does (c10::Error) if a rank does not come within its timeout. `now_ns` is for tests.
Trace::Run agree_on_traced_run(c10d::Store& store, int rank, const std::vector<std::string>& clocks,
                               const std::function<int64_t()>& now_ns = steady_now_ns);

}  // namespace tessera::internal
