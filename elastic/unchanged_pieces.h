#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/format/shard_writer.h"
#include "elastic/copy_memory.h"

namespace tessera::internal {

// Returns the memory as an ordinary tensor, even if the caller is in inference mode.
at::Tensor tensor_of(const std::shared_ptr<CopyMemory>& memory);

// The memory of frozen parameters and buffers that a group's successive parts share. One PartCopy at a time may use it.
class UnchangedPieces {
 public:
  // Moves the pieces of `frozen` parameters and of buffers out of `pieces`, and returns them with their data in
  // memory(). Copies the data if the memory is new; otherwise the memory already holds equal bytes. Pieces of tensors
  // that have changed since the group began stay in `pieces`. The returned pieces have checksums for blocks of
  // `block_bytes`, which must be equal in all calls.
  std::vector<Piece> take(int64_t generation, const std::set<std::string>& frozen, std::vector<Piece>& pieces,
                          int64_t block_bytes);
  // The shared memory; null if no pieces are shared. Must not be written to while a part uses it.
  const std::shared_ptr<CopyMemory>& memory() const { return memory_; }

 private:
  using Key = std::pair<std::string, int64_t>;  // name of the tensor, and first element of the piece

  int64_t generation_ = -1;
  std::set<std::string> changed_;
  std::map<Key, Piece> held_;  // their data is in memory_
  std::shared_ptr<CopyMemory> memory_;
};

}  // namespace tessera::internal
