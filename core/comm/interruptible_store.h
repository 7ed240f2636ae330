#pragma once

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <chrono>
#include <string>
#include <vector>

namespace tessera::internal {

// Keys of a store that begin with a prefix, where another thread may end what waits for one. It asks for the key again
// and again: c10d's own wait cannot be ended, and keeps all other calls of its process from the store, such as those of
// a StallWatch that would learn why it is in vain. Thread-safe as the store below.
class InterruptibleStore : public c10d::PrefixStore {
 public:
  using PrefixStore::PrefixStore;

  // All waits throw std::runtime_error from now on.
  void interrupt() { is_interrupted_ = true; }
  bool is_interrupted() const { return is_interrupted_; }
  // Whether a wait has taken longer than its timeout, and thrown std::runtime_error.
  bool has_timed_out() const { return has_timed_out_; }

  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  std::vector<uint8_t> get(const std::string& key) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;

 private:
  std::atomic<bool> is_interrupted_ = false, has_timed_out_ = false;
};

}  // namespace tessera::internal
