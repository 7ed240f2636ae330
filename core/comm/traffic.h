#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include <tessera/communicator.h>

namespace tessera::internal {

// Counts one group's traffic, and that of the groups split from it. Any thread.
class TrafficCounter {
 public:
  // By the communicator, as are the next two.
  void add_sent(int64_t bytes) noexcept { sent_bytes_ += bytes; }
  // One operation has begun.
  void add_collective() noexcept { ++collectives_; }
  // The thread stood in Pending::wait() for so long, for this operation.
  void add_wait(std::chrono::nanoseconds duration, const std::string& operation);

  Traffic total() const noexcept;  // so far
  // See Communicator::take_waits().
  std::map<std::string, double> take_waits();

 private:
  std::atomic<int64_t> sent_bytes_ = 0;
  std::atomic<int64_t> collectives_ = 0;
  std::atomic<int64_t> wait_ns_ = 0;
  std::mutex waits_mutex_;
  std::optional<std::map<std::string, double>> waits_;  // by operation, once somebody has asked
};

}  // namespace tessera::internal
