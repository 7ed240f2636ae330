#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/comm/group_process.h"

namespace tessera::internal {

class StoreThread;

// Returns the store below all prefix wrappers.
c10d::Store& underlying(c10d::Store& store);

// Opens a TCPStore without waiting for other ranks. Its threads block SIGPIPE. Looks up names with short timeouts
// (ShortNameLookups).
c10::intrusive_ptr<c10d::TCPStore> open_tcp_store(const std::string& host, c10d::TCPStoreOptions options);

// A store whose wait() polls until it has all keys, so that it does not block other calls. Throws c10::Error after the
// timeout. c10d::Store::kNoTimeout means no timeout.
class PollingStore : public c10d::Store {
 public:
  using Store::Store;
  c10::intrusive_ptr<c10d::Store> clone() override { return c10::intrusive_ptr<c10d::Store>::reclaim_copy(this); }
  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
};

// A store whose calls always end. If the serving process is stopped or the link is cut, a call of c10d's TCPStore
// blocks forever, and so do all later calls. This class makes the calls on its own thread. If the store does not answer
// within `patience`, a call throws c10::Error, whose text begins with kNoAnswer. A call that the thread has not begun
// by then is skipped. The destructor detaches the thread if a call still blocks the thread.
//
// get() and multiGet() poll, too. Thread-safe. Every group wraps its store with of(). While a group is formed over the
// program's store, call_with_timeout() limits the calls instead.
class StoreClient : public PollingStore {
 public:
  static constexpr char kNoAnswer[] = "the store, in rank 0's process or the launcher's, does not answer";

  // Wraps `store`. Returns `store` itself if it is a HashStore, which is in this process and needs no thread, or if it
  // is already wrapped.
  static c10::intrusive_ptr<c10d::Store> of(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds patience);

  // If `store`, below its prefix wrappers, is a StoreClient, lowers its patience, also for calls in progress.
  static void limit_patience(c10d::Store& store, std::chrono::milliseconds patience);

  // `patience` is also the timeout of wait(), get() and multiGet().
  StoreClient(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds patience);
  ~StoreClient() override;
  StoreClient(const StoreClient&) = delete;
  StoreClient& operator=(const StoreClient&) = delete;

  using Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  using Store::compareSet;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void append(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys, const std::vector<std::vector<uint8_t>>& values) override;
  bool hasExtendedApi() const override;
  std::vector<std::string> listKeys() override;

 private:
  template <class Act>
  auto call(Act act) const;

  const GroupProcess process_;
  std::atomic<std::chrono::milliseconds> patience_;
  const std::shared_ptr<StoreThread> calls_;
  std::thread thread_;
};

}  // namespace tessera::internal
