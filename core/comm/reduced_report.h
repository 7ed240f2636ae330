#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/communicator.h>

namespace tessera::internal {

// Compares the fingerprints of all ranks, and computes the maximum of each given number over the ranks. Uses one
// all-reduce, whose size does not depend on the number of ranks. On a device, the all-reduce runs after the current
// work without blocking the host, and the result can be read later. Must be used by one thread at a time.
class ReducedReport {
 public:
  // Collective. All ranks must pass the same number of `numbers`. The communicator must outlive the last call.
  ReducedReport(Communicator& comm, uint64_t fingerprint, const std::vector<int64_t>& numbers, const std::string& what);
  // Waits for the all-reduce as Pending::wait() does. Must be called before the functions below. A second call is a
  // no-op. If the all-reduce was aborted, largest(), unlike_ranks() and require_alike() throw CommError.
  void finish();
  // Whether the functions below return without blocking.
  bool has_arrived() const;
  // Returns the maximum of each number over the ranks, in an array that this report owns. Blocks.
  const int64_t* largest();
  // Returns two ranks whose fingerprints differ (lower first), or nullopt if all agree. Blocks. Compares 43 bits.
  std::optional<std::pair<int, int>> unlike_ranks();
  // Throws std::invalid_argument if fingerprints differ: "the ranks disagree about <subject>". Blocks.
  void require_alike(const std::string& subject);

 private:
  void wait();

  Communicator* comm_;
  std::string what_;
  int64_t numbers_ = 0;  // length of `numbers`
  at::Tensor host_;      // [2 + numbers_]: fingerprint, its complement, numbers
  at::Tensor device_;    // copy of host_ on the group's device; host_ itself in a CPU group
  Pending exchange_;
  bool is_finished_ = false;
  std::optional<c10::Event> arrived_;  // set by finish(); null for a CPU group
};

// A queue of reports. look() finishes all, calls Look for arrived ones in order, and blocks until at most four are
// left.
class LateReports {
 public:
  // look() calls this once for each report. Must throw if the report says that the ranks disagree.
  using Look = std::function<void(ReducedReport&)>;
  void add(ReducedReport report, Look look) { waiting_.emplace_back(std::move(report), std::move(look)); }
  void look();

 private:
  std::deque<std::pair<ReducedReport, Look>> waiting_;
};

}  // namespace tessera::internal
