#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera {

// Whether all ranks have one fingerprint, and the largest of each of some numbers over ranks, in one all-reduce: what a
// rank holds and exchanges for it does not grow with their number. It does not stop the host: on a device it travels
// behind what is computed there, and can be looked at when it has come. Used by one thread at a time.
class ReducedReport {
 public:
  // Collective, with as many numbers on all ranks. The communicator outlives the last call.
  ReducedReport(Communicator& comm, uint64_t fingerprint, const std::vector<int64_t>& numbers, const std::string& what);
  // Waits for the exchange as Pending::wait() does. Once, before the others, which throw CommError if it was cut.
  void finish();
  // Whether the next ones return at once.
  bool has_arrived() const;
  // The largest over ranks of each number; waits for it.
  const int64_t* largest();
  // Two ranks that have different fingerprints, if not all have one: the lower one first. Waits. 43 bits are compared.
  std::optional<std::pair<int, int>> unlike_ranks();
  // Waits, and throws std::invalid_argument if they have: "the ranks disagree about <subject>".
  void require_alike(const std::string& subject);

 private:
  void wait();

  Communicator* comm_;
  std::string what_;
  at::Tensor host_;    // [2 + numbers]
  at::Tensor device_;  // the same, which travels; of a CPU group one and the same
  Pending exchange_;
  std::optional<c10::Event> arrived_;  // of a device
};

// Reports that nobody waits for: each is looked at once it has come, one after the other, at one of the next calls.
class LateReports {
 public:
  void add(ReducedReport report) { waiting_.push_back(std::move(report)); }
  void require_alike(const std::string& subject);

 private:
  std::deque<ReducedReport> waiting_;
};

}  // namespace tessera
