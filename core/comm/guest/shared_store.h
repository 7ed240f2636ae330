#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>

namespace tessera::internal {

// Returns the keys of the next group of `size` ranks in a store that the program's groups share. The n-th call of each
// rank gets the same keys. Rank 0 deletes the keys of groups that all ranks have left, if the store lists its keys.
c10::intrusive_ptr<c10d::Store> next_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size);

// Whether rank 0's process serves this store by convention: a TCPStore does.
bool serves_store(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace tessera::internal
