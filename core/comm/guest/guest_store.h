#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

#include "core/comm/guest/text_exchange.h"

namespace tessera::internal {

struct MadeStore {
  c10::intrusive_ptr<c10d::Store> store;
  bool serves = false;  // this rank's process serves the store
};

// Makes a store for the ranks of `exchange`. Collective. If all ranks are on one host (`one_host`) and may open each
// other's files, the store is a c10d::FileStore in an anonymous memory file. Such a store needs no port, thread or file
// name. Otherwise rank 0 serves a c10d::TCPStore at a port that the kernel chooses, and `address` is the address of
// rank 0's host. Throws CommError if a rank cannot reach the store.
MadeStore make_store(const TextExchange& exchange, const std::string& who, int rank, bool one_host,
                     const std::string& address, std::chrono::milliseconds timeout);

// Returns a view of a shared store for the next group of `size` ranks. The n-th calls of all ranks return views of the
// same keys. Rank 0 deletes the keys of groups that all ranks have left, if the store can list its keys.
c10::intrusive_ptr<c10d::Store> next_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size);

// Whether rank 0's process is assumed to serve this store: true for a TCPStore.
bool serves_store(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace tessera::internal
