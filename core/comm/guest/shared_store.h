#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>

namespace tessera::internal {

// Returns a view of a shared store for the next group of `size` ranks. The n-th calls of all ranks return views of the
// same keys. Rank 0 deletes the keys of groups that all ranks have left, if the store can list its keys.
c10::intrusive_ptr<c10d::Store> next_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size);

// Whether rank 0's process is assumed to serve this store: true for a TCPStore.
bool serves_store(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace tessera::internal
