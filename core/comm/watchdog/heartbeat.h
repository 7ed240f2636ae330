#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

namespace tessera::internal {

// Tells the store that this rank lives, and checks the next rank during a stall. Used by one thread.
class Heartbeat {
 public:
  static constexpr int kBeatsMissed = 10;  // after which a rank counts as dead

  // `every`: 0 for no heartbeat.
  Heartbeat(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds every)
      : store_(std::move(store)), rank_(rank), size_(size), every_(every) {}

  bool is_on() const { return every_.count() > 0; }
  bool is_due() const { return is_on() && std::chrono::steady_clock::now() - last_beat_ >= every_; }
  // Counts one beat. If this rank is stalled, returns why the next rank counts as dead; else, or if it lives, "".
  // Beats are counted, not timed: a delay of this rank or of the store does not blame the next rank.
  std::string beat(bool is_stalled);

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_, size_;
  const std::chrono::milliseconds every_;
  std::chrono::steady_clock::time_point last_beat_;
  int64_t beats_of_next_ = -1;
  int missed_ = 0;  // beats of the next rank
};

}  // namespace tessera::internal
