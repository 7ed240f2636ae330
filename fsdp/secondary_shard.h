#pragma once

#include <cstdint>
#include <vector>

#include <tessera/communicator.h>
#include "core/gradients/collective_log.h"
#include "core/memory/counted_buffers.h"
#include "fsdp/flat_parameter.h"

namespace tessera::internal {

// The group of ranks that share a secondary copy (ranks_per_secondary_copy), and the allocator of secondary shards.
struct SecondaryGroup {
  Communicator* comm = nullptr;  // null: no secondary shards
  CountedBuffers* memory = nullptr;
};

// One unit's secondary shard: this rank's part of the unsharded parameters, kept for backward. An all-gather of
// secondary shards runs among fewer and nearer ranks than an all-gather of shards (hpZ of ZeRO++).
//
//   kNone --keep()--> kWanted --cut()--> kHeld --evict()--> kWanted, drop() from any state --> kNone
//
// All ranks must call keep(), cut(), evict() and drop() at the same points. Used by one thread at a time.
class SecondaryShard {
 public:
  // The states, with the memory that each state costs.
  enum class State : uint8_t {
    kNone,    // 0
    kWanted,  // 0; the next reshard calls cut()
    kHeld,    // 1/n of the unsharded parameters, in gather_dtype(), in a group of n ranks
  };

  // `flat_parameters` must outlive this object.
  SecondaryShard(SecondaryGroup group, FlatParameters& flat_parameters)
      : group_(group), flat_parameters_(flat_parameters) {}

  State state() const { return state_; }
  Communicator* comm() const { return group_.comm; }

  // Makes the next reshard call cut(), unless the unit is stale. A no-op without a group, or if the state is not kNone.
  void keep();
  // Copies this rank's part of `full`, the unsharded flat parameters, into new memory. A no-op unless kWanted.
  void cut(const std::vector<at::Tensor>& full);
  // Starts an all-gather of flat parameter number `flat_parameter` into `full`. Must be kHeld. Collective in the group.
  void start_gather(size_t flat_parameter, const at::Tensor& full, CollectiveLog& log);
  // Frees the memory if kHeld. The next reshard then calls cut() again.
  void evict();
  // Blocks until no peer reads the secondary shard, and frees it.
  void drop();

 private:
  const SecondaryGroup group_;
  FlatParameters& flat_parameters_;
  State state_ = State::kNone;
  std::vector<at::Tensor> parts_;  // one for each flat parameter if kHeld; otherwise empty
};

}  // namespace tessera::internal
