#pragma once

#include <memory>
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

// The parameters of one wrapped module, which are unsharded, used and resharded together.
//
//   kSharded -- start_fetch() --> kFetching -- unshard() --> kUnsharding -- wait_for_unshard() --> kUnsharded
//      ^                                                                                               |
//      +------------------------------------------ reshard() ------------------------------------------+
//
// UnshardedUnits decides when these methods are called. Collective methods must be called in one order on all ranks.
// Used by one thread at a time.
class Unit {
 public:
  // The states, with the memory that each costs besides the shard, which is 1/N of the parameters in their own dtype.
  enum class State : uint8_t {
    kSharded,     // 0
    kFetching,    // with offload: the shard in gather_dtype(), on the device, which a copy is filling
    kUnsharding,  // kFetching's cost, and all parameters in gather_dtype(), which an all-gather is filling
    kUnsharded,   // all parameters in gather_dtype(): the module's parameters are views of them
    kSummoned,    // see SummonedParameters
    kWhole,       // 0: always unsharded, because the shard has all parameters (one rank, no cast, no offload)
  };

  // Copies the values of the planned parameters to shards, and makes the module's own parameters views of pages.
  // Collective if `sync_module_states`.
  Unit(int index, const PlannedUnit& plan, const UnitContext& context, const FlatParameterOptions& options,
       bool sync_module_states);
  ~Unit();
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  int index() const { return index_; }
  const std::string& name() const { return name_; }            // for errors: "unit 'blocks.3'"
  const std::string& plan_name() const { return plan_name_; }  // in the plan: "blocks.3"
  State state() const { return state_; }
  bool is_summoned() const { return state_ == State::kSummoned; }
  const FlatParameters& flat_parameters() const { return flat_parameters_; }
  int64_t full_bytes() const;  // bytes of all parameters in gather_dtype()

  // ---- life cycle

  // Starts reading a shard that is on a disk into host memory. Not collective.
  void read_ahead();
  // Starts copying a shard that is in host memory to the device. Not collective.
  void start_fetch();
  // Starts the all-gather of the unit's parameters; a no-op unless kSharded or kFetching. Collective.
  void unshard();
  // Whether the all-gather moves data before wait_for_unshard(); false if it is lazy.
  bool can_unshard_ahead() const;
  // Must be called after unshard(). Blocks until the parameters may be used on the current stream.
  void wait_for_unshard();
  // Frees the unsharded parameters, after an all-gather or copy in flight has completed. A no-op if summoned.
  void reshard();
  SecondaryShard& secondary() { return secondary_; }

  // ---- the shards

  // Must be called before a write to shards in host memory. Blocks until no copy reads them.
  void wait_for_reads();
  // Whether the shards were written to since the last all-gather.
  bool is_stale() const;
  // Returns the sum of autograd's version counters of the shards. They must not change between forward and backward.
  uint32_t version() const;
  // Calls Page::set_current() of all attached pages.
  void set_current(Page::GradMode mode);

  // ---- full parameters

  // Reshards, and shows full parameters in their own dtype. If kElsewhere, only joins the all-gathers. Collective.
  void summon(Summon where, SummonedParameters::Changes changes);
  // Ends summon(); the unit must be summoned. If `writeback` is false, changes are lost.
  void dismiss(bool writeback);
  // Copies changes into the shards, as dismiss(true) would. The unit must be summoned. Not collective.
  void write_back();
  // Returns a flat parameter in full, in its own dtype: the summoned one, or else gathered into new memory. Collective.
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
  std::vector<at::Tensor> buffers_;  // one for each flat parameter, if unsharding or unsharded
  StreamUses uses_;                  // the streams that use the buffers
};

}  // namespace tessera::internal
