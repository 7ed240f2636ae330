#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include <tessera/communicator.h>

namespace tessera {

// The time that each rank has waited in collectives during an interval. All ranks get equal reports. A collective ends
// when the last rank joins it, so the rank with the shortest waits is the straggler.
struct WaitReport {
  struct Rank {
    double wait_s = 0;      // seconds that the rank's thread spent in Pending::wait()
    double longest_s = 0;   // the part of wait_s that was spent in `operation`
    std::string operation;  // operation with the longest waits, cut to kOperationBytes - 1; "" if none
  };
  std::vector<Rank> ranks;  // in rank order
  double elapsed_s = 0;     // length of the interval, maximum over the ranks

  // Returns the straggler: the rank with the shortest waits. Returns nullopt with one rank, or if the median wait of
  // the other ranks exceeds the shortest wait by less than least_share * elapsed_s.
  std::optional<int> waited_for(double least_share = 0.1) const;

  // Returns one line: "rank 2 is waited for: it waited 1% of 10.0 s, the others 38% (median), most in all-reduce of
  // losses", or "no rank is waited for: ...".
  std::string text() const;

  // Size of an operation's name in a report, in bytes, with the terminating 0.
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
// With NCCL, the report has only the waits of the host. The host runs ahead of the device, and waits only when it needs
// a value. Only one reporter per communicator is allowed. Must be used by one thread at a time.
class WaitReporter {
 public:
  explicit WaitReporter(Communicator& comm);  // starts the first interval; `comm` must outlive this object

  // Reports the interval since the last report or construction, for this group and the groups split from it.
  // Collective: two small all-gathers, whose waits count in the next report. Throws CommError.
  WaitReport report();

 private:
  Communicator& comm_;
  std::chrono::steady_clock::time_point since_;
};

}  // namespace tessera
