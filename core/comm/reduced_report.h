#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/communicator.h>

namespace tessera::internal {

// Compares a fingerprint over all ranks, and computes the maximum of some numbers over ranks, in one all-reduce. Its
// size does not depend on the number of ranks. It does not block the host: on a device, the exchange runs after the
// current work, and the result can be read later. Must be used by one thread at a time.
class ReducedReport {
 public:
  // Collective. All ranks must pass the same number of `numbers`. The communicator must outlive the last call.
  ReducedReport(Communicator& comm, uint64_t fingerprint, const std::vector<int64_t>& numbers, const std::string& what);
  // Waits for the exchange as Pending::wait() does. Must be called before the functions below, which throw CommError,
  // where they block, if the exchange was aborted. A second call is a no-op.
  void finish();
  // Whether the functions below return without blocking.
  bool has_arrived() const;
  // The maximum of each number over ranks. Blocks.
  const int64_t* largest();
  // Returns two ranks whose fingerprints differ (lower first), or nullopt if all agree. Blocks. Compares 43 bits.
  std::optional<std::pair<int, int>> unlike_ranks();
  // Throws std::invalid_argument if fingerprints differ: "the ranks disagree about <subject>". Blocks.
  void require_alike(const std::string& subject);

 private:
  void wait();

  Communicator* comm_;
  std::string what_;
  int64_t numbers_ = 0;  // their count
  at::Tensor host_;      // [2 + numbers]
  at::Tensor device_;    // same shape, on the group's device; for a CPU group it is host_
  Pending exchange_;
  bool is_finished_ = false;
  std::optional<c10::Event> arrived_;  // null for a CPU group
};

// Reports that are read later. look() reads those that have arrived, in order; it blocks only if too many are waiting.
class LateReports {
 public:
  // Throws if the report shows an error.
  using Look = std::function<void(ReducedReport&)>;
  void add(ReducedReport report, Look look) { waiting_.emplace_back(std::move(report), std::move(look)); }
  void look();

 private:
  std::deque<std::pair<ReducedReport, Look>> waiting_;
};

}  // namespace tessera::internal
