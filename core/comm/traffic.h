#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include <tessera/communicator.h>
#include "core/comm/collective.h"

namespace tessera::internal {

// Counts the traffic of one group and of the groups that were split from it. Thread-safe.
class TrafficCounter {
 public:
  void add_sent(int64_t bytes) noexcept { sent_bytes_ += bytes; }
  // Counts an operation that has begun.
  void add_collective() noexcept { ++collectives_; }
  // Counts the duration of Pending::wait() for this operation.
  void add_wait(std::chrono::nanoseconds duration, const std::string& operation);

  Traffic total() const noexcept;
  // See Communicator::reset_wait_times().
  std::map<std::string, double> reset_wait_times();

 private:
  std::atomic<int64_t> sent_bytes_ = 0;
  std::atomic<int64_t> collectives_ = 0;
  std::atomic<int64_t> wait_ns_ = 0;
  std::mutex waits_mutex_;
  std::optional<std::map<std::string, double>> waits_;  // by operation; null before the first reset_wait_times()
};

// Returns the least payload that this rank can send in a collective. For backends that do not report their traffic.
int64_t bytes_sent(const Collective& collective, int rank, int size);

}  // namespace tessera::internal
