#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include <tessera/communicator.h>

namespace tessera {

// The time that each rank has waited in collectives during an interval; equal on all ranks. A collective ends when the
// last rank joins it, so the rank with the shortest waits is the straggler.
struct WaitReport {
  struct Rank {
    double wait_s = 0;      // of the thread, in Pending::wait()
    double longest_s = 0;   // the part of `operation`
    std::string operation;  // "all-gather of blocks.3 (49152 elements)", cut to kOperationBytes - 1; "" for none
  };
  std::vector<Rank> ranks;  // in rank order
  double elapsed_s = 0;     // the longest interval of a rank

  // Returns the straggler: the rank that waits least, if the median wait of the others exceeds its own by at least this
  // share of the interval. nullopt if the waits are alike, or there is one rank.
  std::optional<int> waited_for(double least_share = 0.1) const;

  // One line: "rank 2 is waited for: it waited 1% of 10.0 s, the others 38% (median), most in all-reduce of losses", or
  // "no rank is waited for: ...".
  std::string text() const;

  // The longest name of an operation in a report, in bytes.
  static constexpr size_t kOperationBytes = 88;
};

// Makes wait reports at intervals:
//
//   tessera::WaitReporter waits(*comm);
//   for (int step = 1; step <= steps; ++step) {
//     train(step);
//     if (step % 100 == 0) { auto report = waits.report(); if (comm->rank() == 0) std::cout << report.text() << "\n"; }
//   }
//
// With NCCL it measures waits of the host, which runs ahead of the device and waits only when it needs a value. A
// communicator can have one reporter. Must be used by one thread at a time.
class WaitReporter {
 public:
  // Starts the first interval. `comm` must outlive this object.
  explicit WaitReporter(Communicator& comm);

  // Reports the interval since the last report or construction, for this group and those split from it. Collective: one
  // all-gather of 112 bytes a rank, whose own wait counts in the next report. Throws CommError.
  WaitReport report();

 private:
  Communicator& comm_;
  std::chrono::steady_clock::time_point since_;
};

}  // namespace tessera
