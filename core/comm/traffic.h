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
  // Must be called once for each operation, when it begins.
  void add_collective() noexcept { ++collectives_; }
  // Adds the duration of a wait to the total. After the first reset_wait_times(), also to the total of `operation`.
  void add_wait(std::chrono::nanoseconds duration, const std::string& operation);

  Traffic total() const noexcept;
  // See Communicator::reset_wait_times().
  std::map<std::string, double> reset_wait_times();

 private:
  std::atomic<int64_t> sent_bytes_ = 0;
  std::atomic<int64_t> collectives_ = 0;
  std::atomic<int64_t> wait_ns_ = 0;
  std::mutex waits_mutex_;
  std::optional<std::map<std::string, double>> waits_;  // seconds by operation; null before reset_wait_times()
};

// Returns the least number of bytes that this rank can send in `collective`. For backends that do not report traffic.
int64_t bytes_sent(const Collective& collective, int rank, int size);

}  // namespace tessera::internal
