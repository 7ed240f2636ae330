#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

namespace tessera {

// Finds out, through the store, why an operation does not end: a second thread per rank that does
// nothing while operations end within a second.
//
// Then it publishes what this rank has started lately and reads what the others published. A rank
// that failed left its reason there. Ranks that started different operations under the same
// number have diverged: one of them left out a layer, say. Either ends the wait long before the
// timeout, with an error that says who and what. (PyTorch's flight recorder collects the same for
// reading after the fact.) Thread-safe.
class StallWatch {
 public:
  // `interrupt` is called from the watch's thread, every quarter of a second, while a wait goes on
  // that has become pointless; explanation() then tells why. A world of one needs no thread.
  StallWatch(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::function<void()> interrupt);
  ~StallWatch();
  StallWatch(const StallWatch&) = delete;
  StallWatch& operator=(const StallWatch&) = delete;

  // Notes an operation as number `sequence` of this rank.
  void started(uint64_t sequence, std::string description);
  void begin_wait();
  void end_wait();

  // Tells all ranks that this one is out of the group. The first reason counts.
  void publish_failure(const std::string& reason) noexcept;

  // Why the last wait was interrupted, or, asked after a failure of the transport, what the ranks
  // that failed said of it ("" if nothing is known).
  std::string explanation();

  // Which ranks wait too, and which do not: for the text of a timeout.
  std::string who_waits();

 private:
  struct Started {
    uint64_t sequence;
    std::string description;
  };

  void run();
  void look();  // one look into the store, on behalf of a wait that takes long
  std::string failures();
  std::string divergence(const std::deque<Started>& own);
  bool read(const std::string& key, std::string* value);
  std::string key(const char* kind, int rank) const;

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int size_;
  const std::function<void()> interrupt_;

  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  bool waiting_ = false;
  bool published_ = false;
  bool failure_published_ = false;
  std::chrono::steady_clock::time_point wait_began_;
  std::deque<Started> recent_;
  std::string explanation_;
  std::thread thread_;
};

}  // namespace tessera
