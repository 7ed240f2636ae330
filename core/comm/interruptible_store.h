#pragma once

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <chrono>
#include <string>
#include <vector>

namespace tessera::internal {

// A PrefixStore whose waits another thread can interrupt. c10d's own wait() cannot be interrupted, and it blocks all
// other calls of the store, such as those of a Watchdog. Therefore wait() of this class polls. Thread-safe if the
// underlying store is thread-safe.
class InterruptibleStore : public c10d::PrefixStore {
 public:
  using PrefixStore::PrefixStore;

  // Makes current and later waits throw std::runtime_error, unless their keys exist.
  void interrupt() { is_interrupted_ = true; }
  bool is_interrupted() const { return is_interrupted_; }
  // Whether a wait has exceeded its timeout and thrown std::runtime_error.
  bool has_timed_out() const { return has_timed_out_; }

  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  std::vector<uint8_t> get(const std::string& key) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;

 private:
  std::atomic<bool> is_interrupted_ = false, has_timed_out_ = false;
};

}  // namespace tessera::internal
