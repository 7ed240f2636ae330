#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera {

// A few bytes of every rank, of the same number, gathered on all of them without stopping the host: on a device they
// travel behind what it computes, and can be looked at when they have come. Used by one thread at a time.
class GatheredReports {
 public:
  // Collective. The communicator outlives finish().
  GatheredReports(Communicator& comm, const std::vector<uint8_t>& own, const std::string& what);
  // Waits for the exchange as Pending::wait() does. Once, before the others.
  void finish();
  // Whether wait() returns at once.
  bool have_arrived() const;
  // [ranks, bytes] in host memory; waits for it.
  const at::Tensor& wait();
  // Waits, and throws std::invalid_argument if the ranks' first `bytes` differ: "the ranks disagree about <subject>".
  void require_alike(int64_t bytes, const std::string& subject);

 private:
  at::Tensor own_, on_device_, all_, table_;
  Pending exchange_;
  std::optional<c10::Event> arrived_;  // of a device
};

// The lowest rank whose report begins with other `bytes` than rank 0's.
std::optional<int64_t> first_unlike(const at::Tensor& table, int64_t bytes);

// Reports that nobody waits for: each is looked at once it has come, one after the other, at one of the next calls.
class LateReports {
 public:
  void add(GatheredReports reports) { waiting_.push_back(std::move(reports)); }
  void require_alike(int64_t bytes, const std::string& subject);

 private:
  std::deque<GatheredReports> waiting_;
};

}  // namespace tessera
