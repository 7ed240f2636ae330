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

// The memory as a tensor, which no autograd mode of its creator restricts.
at::Tensor tensor_of(const std::shared_ptr<CopyMemory>& memory);

// The memory of frozen parameters and of buffers, which successive parts of a group share. Used by one part at a time.
class UnchangedPieces {
 public:
  // Moves the pieces of `frozen` parameters and of buffers out of `pieces`, and returns them with their data in
  // memory(). They are copied if that is new; otherwise their bytes are equal to those there. Pieces that have changed
  // in this group stay in `pieces`.
  std::vector<Piece> take(int64_t generation, const std::set<std::string>& frozen, std::vector<Piece>& pieces);
  // Must not be written to while a part refers to it. Null if there are no such pieces.
  const std::shared_ptr<CopyMemory>& memory() const { return memory_; }

 private:
  using Key = std::pair<std::string, int64_t>;  // the name, and the first element

  int64_t generation_ = -1;
  std::set<std::string> changed_;
  std::map<Key, at::Tensor> held_;  // in memory_
  std::shared_ptr<CopyMemory> memory_;
};

}  // namespace tessera::internal
