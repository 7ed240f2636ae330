#pragma once

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/comm/store_client.h"
#include "core/runtime/guarded_by.h"
#include "elastic/peer_link.h"

namespace tessera::internal {

// [Note: the store of a group]
// The member that leads the decision on a group keeps the group's store in its memory, and its PeerServer answers the
// other members' calls. c10d's TCPStore would need a server and a port of its own for each group. It also asks the name
// server for the name of each client. That took 5 s on a host whose name server lost queries, which is too long for a
// regroup.

// The stores that this process serves. Is thread-safe.
class ServedStores {
 public:
  // Serves a store for the group of `generation`, unless it is served already. Ends the stores of older groups, except
  // that of `generation` - 1, which may still have late readers.
  void serve(int64_t generation);
  // Returns the answer to a call of a GroupStore. Throws std::runtime_error if the call cannot be answered.
  PeerMessage answer(const PeerMessage& request) const;

 private:
  mutable std::mutex mutex_;
  std::map<int64_t, c10::intrusive_ptr<c10d::HashStore>> stores_ TESSERA_GUARDED_BY(mutex_);
};

// A client of a group's store in the process of a member. A call throws c10::Error if that process has ended, or has
// not answered within the timeout. Is thread-safe; calls run one at a time.
class GroupStore : public PollingStore {
 public:
  // Connects at the first call.
  GroupStore(Member server, int64_t generation, std::chrono::milliseconds timeout);

  using Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override { multiSet({key}, {value}); }
  using Store::compareSet;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override { return multiGet({key}).front(); }
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys, const std::vector<std::vector<uint8_t>>& values) override;
  bool hasExtendedApi() const override { return true; }

 private:
  struct Call;
  PeerMessage ask(const Call& call);

  const Member server_;
  const int64_t generation_;
  std::mutex mutex_;
  std::unique_ptr<PeerConnection> connection_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::internal
