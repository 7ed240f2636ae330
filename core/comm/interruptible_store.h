#pragma once

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <chrono>
#include <string>
#include <vector>

namespace tessera::internal {

// Keys of a store that begin with a prefix, with waits that another thread can end. c10d's own wait cannot be ended,
// and blocks all other calls of its process, such as those of a Watchdog. So this class's wait() polls. Thread-safe if
// the underlying store is.
class InterruptibleStore : public c10d::PrefixStore {
 public:
  using PrefixStore::PrefixStore;

  // Makes all waits throw std::runtime_error from now on.
  void interrupt() { is_interrupted_ = true; }
  bool is_interrupted() const { return is_interrupted_; }
  // Whether a wait has exceeded its timeout, and thrown std::runtime_error.
  bool has_timed_out() const { return has_timed_out_; }

  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  std::vector<uint8_t> get(const std::string& key) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;

 private:
  std::atomic<bool> is_interrupted_ = false, has_timed_out_ = false;
};

}  // namespace tessera::internal
