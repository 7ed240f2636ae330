#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include <tessera/communicator.h>

namespace tessera {

// How long each rank has waited in collectives over some time, the same on all ranks. A collective ends when the last
// rank has come to it, so the rank that waits least is the one that the others wait for (a straggler).
struct WaitReport {
  struct Rank {
    double wait_s = 0;      // of the thread, in Pending::wait()
    double longest_s = 0;   // of these, in the operation that it waited for longest
    std::string operation;  // which: "all-gather of blocks.3 (49152 elements)", cut to kOperationBytes - 1; "" for none
  };
  std::vector<Rank> ranks;  // in rank order
  double elapsed_s = 0;     // of the longest of them

  // The rank that waits least, if the others' median wait is longer than its own by at least this share of the time;
  // none where ranks wait alike, or there is one.
  std::optional<int> waited_for(double least_share = 0.1) const;

  // One line: "rank 2 is waited for: it waited 1% of 10.0 s, the others 38% (median), most in all-reduce of losses", or
  // "no rank is waited for: ...".
  std::string text() const;

  // Of an operation's name, in a report, so many at most.
  static constexpr size_t kOperationBytes = 88;
};

// Makes such reports every now and then:
//
//   tessera::WaitReporter waits(*comm);
//   for (int step = 1; step <= steps; ++step) {
//     train(step);
//     if (step % 100 == 0) { auto report = waits.report(); if (comm->rank() == 0) std::cout << report.text() << "\n"; }
//   }
//
// On a device with streams (NCCL) it is the host that is asked, which runs ahead of the device: it waits where it needs
// a value. One for a communicator, which outlives it; used by one thread at a time.
class WaitReporter {
 public:
  // The first report's time begins here. `comm` outlives it.
  explicit WaitReporter(Communicator& comm);

  // Of the time since the last report, or construction, in this group and those split from it. Collective: one
  // all-gather of 112 bytes a rank, whose own wait is the next report's. Throws CommError.
  WaitReport report();

 private:
  Communicator& comm_;
  std::chrono::steady_clock::time_point since_;
};

}  // namespace tessera
