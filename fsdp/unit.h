#pragma once

#include <string>
#include <vector>

#include <tessera/communicator.h>
#include "core/gradients/collective_log.h"
#include "core/memory/counted_buffers.h"
#include "core/paging/residency.h"
#include "core/runtime/copy_engine.h"
#include "core/runtime/stream_uses.h"
#include "fsdp/flat_parameter.h"
#include "fsdp/secondary_shard.h"
#include "fsdp/summoned_parameters.h"
#include "offload/offloaded_memory.h"

namespace tessera::internal {

// The resources that all units of a model share. The references must outlive the units.
struct UnitContext {
  Communicator& comm;      // the ranks that share a copy of the model
  CountedBuffers& memory;  // buffers of unsharded parameters
  CollectiveLog& log;
  ShardSource source{};
  SecondaryGroup secondary{};
};

// The parameters of one wrapped module. They are unsharded, used and resharded together.
//
//   kSharded -- start_fetch() --> kFetching -- unshard() --> kUnsharding -- wait_for_unshard() --> kUnsharded
//      ^                                                                                               |
//      +------------------------------------------ reshard() ------------------------------------------+
//
// UnshardedUnits calls these methods. All ranks must call the collective methods in the same order.
// Used by one thread at a time.
class Unit {
 public:
  // The states, and the memory that each costs in addition to the shard (1/N of the parameters in their own dtype).
  enum class State : uint8_t {
    kSharded,     // 0
    kFetching,    // with offload: the device copy of the shard in gather_dtype(), being filled
    kUnsharding,  // kFetching's cost, plus all parameters in gather_dtype(), being gathered
    kUnsharded,   // all parameters in gather_dtype(), viewed by the module's parameters
    kSummoned,    // see SummonedParameters
    kWhole,       // 0: always unsharded, because the shard has all parameters (one rank, no cast, no offload)
  };

  // Copies the values of the planned parameters to shards. Makes the module's own parameters views of pages. Collective
  // if `sync_module_states`.
  Unit(int index, const PlannedUnit& plan, const UnitContext& context, const FlatParameterOptions& options,
       bool sync_module_states);
  ~Unit();
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  int index() const { return index_; }
  const std::string& name() const { return name_; }            // for errors: "unit 'blocks.3'"
  const std::string& plan_name() const { return plan_name_; }  // the name in the plan: "blocks.3"
  State state() const { return state_; }
  bool is_summoned() const { return state_ == State::kSummoned; }
  const FlatParameters& flat_parameters() const { return flat_parameters_; }
  int64_t full_bytes() const;  // bytes of all parameters in gather_dtype()

  // ---- life cycle

  // Starts reading the shard from disk into host memory, if it is on disk. Not collective.
  void read_ahead();
  // Starts copying the shard from host memory to the device, if it is in host memory. Not collective.
  void start_fetch();
  // Starts the all-gather of the unit's parameters; a no-op unless kSharded or kFetching. Collective.
  void unshard();
  // Whether an all-gather would move data before wait_for_unshard(); false if the all-gather is lazy.
  bool can_unshard_ahead() const;
  // Must be called after unshard(). Blocks until operators on the current stream may use the parameters.
  void wait_for_unshard();
  // Frees the unsharded parameters after the all-gather or copy in flight has completed. A no-op if summoned.
  void reshard();
  SecondaryShard& secondary() { return secondary_; }

  // ---- the shards

  // Must be called before a write to shards in host memory. Blocks until no copy in flight reads the shards.
  void wait_for_reads();
  // Whether the shards were written after the last all-gather.
  bool is_stale() const;
  // Returns the sum of the shards' autograd version counters. Must be equal in forward and backward.
  uint32_t version() const;
  // Calls Page::set_current() on all attached pages.
  void set_current(Page::GradMode mode);

  // ---- full parameters

  // Reshards the unit, and shows full parameters in their own dtype. If kElsewhere, only joins all-gathers. Collective.
  void summon(Summon where, SummonedParameters::Changes changes);
  // Ends summon(); the unit must be summoned. If `writeback` is false, changes are lost.
  void dismiss(bool writeback);
  // Copies changes into the shards, like dismiss(true). The unit must be summoned. Not collective.
  void write_back();
  // Returns all elements of a flat parameter in its own dtype, gathered unless the unit is summoned. Collective.
  at::Tensor full_values(const PagedFlatParameter& paged);

 private:
  bool has_secondary() const { return secondary_.state() == SecondaryShard::State::kHeld && !is_stale(); }
  void start_all_gather(PagedFlatParameter& paged, const at::Tensor& full);
  void free_staging();

  const int index_;
  const std::string name_;
  const std::string plan_name_;
  const UnitContext context_;
  FlatParameters flat_parameters_;
  SecondaryShard secondary_;
  SummonedParameters summoned_;
  State state_ = State::kSharded;
  std::vector<at::Tensor> buffers_;  // one for each flat parameter, while unsharding or unsharded
  StreamUses uses_;                  // streams that use the buffers
};

}  // namespace tessera::internal
