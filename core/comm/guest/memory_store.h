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

}  // namespace tessera::internal
