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

// Whether all ranks have one fingerprint, and the largest of each of some numbers over ranks, in one all-reduce: what a
// rank holds and exchanges for it does not grow with their number. It does not stop the host: on a device it travels
// behind what is computed there, and can be looked at when it has come. Used by one thread at a time.
class ReducedReport {
 public:
  // Collective, with as many numbers on all ranks. The communicator outlives the last call. `alike`: [m] kLong on the
  // group's device, each of 0 to kLargestAlike: numbers that must be the same on all ranks, and that the host need not
  // know.
  ReducedReport(Communicator& comm, uint64_t fingerprint, const std::vector<int64_t>& numbers, const std::string& what,
                const at::Tensor& alike = {});
  static constexpr int kRankBits = 20;
  static constexpr int64_t kLargestAlike = (int64_t{1} << (63 - kRankBits)) - 1;
  // Waits for the exchange as Pending::wait() does. Before the others, which throw CommError if it was aborted; a
  // second time it does nothing.
  void finish();
  // Whether the next ones return at once.
  bool has_arrived() const;
  // The largest over ranks of each number; waits for it.
  const int64_t* largest();
  // Two ranks that have different fingerprints, if not all have one: the lower one first. Waits. 43 bits are compared.
  std::optional<std::pair<int, int>> unlike_ranks();
  // Of `alike` the first that is not the same on all ranks, and two that have other ones, the lower one first. Waits.
  struct Unlike {
    size_t number;
    std::pair<int, int> ranks;
  };
  std::optional<Unlike> first_unlike();
  // Waits, and throws std::invalid_argument if there are such ranks: "the ranks disagree about <subject>".
  void require_alike(const std::string& subject);

 private:
  void wait();
  std::optional<std::pair<int, int>> unlike_at(int64_t place, int64_t place_of_complement) const;

  Communicator* comm_;
  std::string what_;
  int64_t numbers_ = 0;  // how many
  at::Tensor host_;      // [2 + numbers + 2 * alike]
  at::Tensor device_;    // the same, which travels; of a CPU group one and the same
  Pending exchange_;
  bool is_finished_ = false;
  std::optional<c10::Event> arrived_;  // of a device
};

// Reports that nobody waits for: each is looked at once it has come, one after the other, at one of the next calls.
class LateReports {
 public:
  // Throws what a report tells of.
  using Look = std::function<void(ReducedReport&)>;
  void add(ReducedReport report, Look look) { waiting_.emplace_back(std::move(report), std::move(look)); }
  void look();

 private:
  std::deque<std::pair<ReducedReport, Look>> waiting_;
};

}  // namespace tessera::internal
