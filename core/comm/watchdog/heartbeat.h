#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

namespace tessera::internal {

// Publishes in the store that this rank is alive, and during a stall checks the next rank. Must be used by one thread.
class Heartbeat {
 public:
  static constexpr int kBeatsMissed = 10;  // a rank that misses this number of beats counts as dead

  // `every` is the interval. 0 means no heartbeat.
  Heartbeat(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds every)
      : store_(std::move(store)), rank_(rank), size_(size), every_(every) {}

  bool is_on() const { return every_.count() > 0; }
  bool is_due() const { return is_on() && std::chrono::steady_clock::now() - last_beat_ >= every_; }
  // Publishes one beat. If this rank is stalled and the next rank counts as dead, returns an error text; otherwise "".
  // Compares numbers of beats, not times, so that a delay of this rank or the store is not blamed on the next rank.
  std::string beat(bool is_stalled);

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_, size_;
  const std::chrono::milliseconds every_;
  std::chrono::steady_clock::time_point last_beat_;
  int64_t beats_of_next_ = -1;
  int missed_ = 0;  // successive beats that the next rank has missed
};

}  // namespace tessera::internal
