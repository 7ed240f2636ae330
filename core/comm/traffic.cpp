#include "core/comm/traffic.h"

#include <utility>

namespace tessera::internal {

void TrafficCounter::add_wait(std::chrono::nanoseconds duration, const std::string& operation) {
  constexpr size_t kMaxOperations = 4096;  // for programs that number their operations
  wait_ns_ += duration.count();
  const std::lock_guard lock(waits_mutex_);
  if (!waits_) return;
  const bool has_room = waits_->size() < kMaxOperations || waits_->contains(operation);
  (*waits_)[has_room ? operation : "other operations"] += std::chrono::duration<double>(duration).count();
}

Traffic TrafficCounter::total() const noexcept {
  return {sent_bytes_.load(), collectives_.load(), static_cast<double>(wait_ns_.load()) * 1e-9};
}

std::map<std::string, double> TrafficCounter::reset_wait_times() {
  const std::lock_guard lock(waits_mutex_);
  return std::exchange(waits_, std::map<std::string, double>()).value_or(std::map<std::string, double>());
}

}  // namespace tessera::internal
