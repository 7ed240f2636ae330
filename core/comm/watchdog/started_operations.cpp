#include "core/comm/watchdog/started_operations.h"

#include <utility>

namespace tessera::internal {

void StartedOperations::add(uint64_t sequence, std::string description) {
  std::lock_guard lock(mutex_);
  if (starting_thread_ != thread_number()) starting_thread_ = 0;
  recent_.push_back({sequence, std::move(description)});
  if (recent_.size() > kMostRecent) recent_.pop_front();
}

std::deque<StartedOperation> StartedOperations::recent() const {
  std::lock_guard lock(mutex_);
  return recent_;
}

WaitRegistry::Progress StartedOperations::progress() const {
  std::lock_guard lock(mutex_);
  return {recent_.empty() ? 0 : recent_.back().sequence + 1, starting_thread_};
}

void StartedOperations::begin_wait(std::optional<uint64_t> sequence) {
  std::lock_guard lock(mutex_);
  is_waiting_ = true;
  awaited_ = sequence;
  waiting_thread_ = thread_number();
  wait_began_ = std::chrono::steady_clock::now();
}

void StartedOperations::end_wait() {
  std::lock_guard lock(mutex_);
  is_waiting_ = false;
}

bool StartedOperations::is_stalled() const {
  std::lock_guard lock(mutex_);
  return is_stalled_locked();
}

std::optional<WaitRegistry::Wait> StartedOperations::long_wait() const {
  std::lock_guard lock(mutex_);
  if (!awaited_ || !is_stalled_locked()) return std::nullopt;
  for (const StartedOperation& operation : recent_)
    if (operation.sequence == *awaited_) return WaitRegistry::Wait{*awaited_, operation.description, waiting_thread_};
  return WaitRegistry::Wait{*awaited_, "an operation of long ago", waiting_thread_};
}

}  // namespace tessera::internal
