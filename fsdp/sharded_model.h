#pragma once

#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <tessera/communicator.h>
#include <tessera/model/data_parallel.h>
#include <tessera/model/model_shards.h>
#include <tessera/options/fsdp_options.h>
#include "core/gradients/collective_log.h"
#include "core/layout/mesh.h"
#include "core/memory/counted_buffers.h"
#include "core/paging/residency.h"
#include "core/runtime/stream_uses.h"
#include "fsdp/cast_buffers.h"
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
  // Completes an all-gather or copy in flight, then frees unsharded parameters. Frees nothing if summoned or kWhole.
  void reshard();
  SecondaryShard& secondary() { return secondary_; }

  // ---- the shards

  // Must be called before a write to shards in host memory. Blocks until no copy in flight reads the shards.
  void wait_for_reads();
  bool is_stale() const;  // whether the shards were written after the last all-gather
  // Returns the sum of the shards' autograd version counters. If it changes after forward, backward must throw.
  uint32_t version() const;
  void set_current(Page::GradMode mode);  // calls Page::set_current() on all attached pages

  // ---- full parameters

  // Reshards the unit, and shows full parameters in their own dtype. If kElsewhere, only joins all-gathers. Collective.
  void summon(Summon where, SummonedParameters::Changes changes);
  // Ends summon(); the unit must be summoned. If `writeback` is false, changes are lost.
  void dismiss(bool writeback);
  // Copies this rank's part of the full parameters into the shards. The unit must be summoned. If it was summoned with
  // kLost, copies nothing, and throws std::logic_error if a parameter was changed. Not collective.
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

// The sharded module: its units, the names of its shards, and memory reports. UnshardedUnits decides when to unshard
// units. ShardedGradients owns the gradients.
class ShardedModel {
 public:
  // Plans units, checks that the ranks' plans are equal, and shards the module. Collective. Afterwards, each operator
  // on a parameter calls `pager` first.
  ShardedModel(torch::nn::Module& module, std::shared_ptr<Communicator> comm, const FsdpOptions& options, Pager* pager);

  const FsdpOptions& options() const { return options_; }
  const Mesh& mesh() const { return mesh_; }
  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  std::vector<std::unique_ptr<Unit>>& units() { return units_; }
  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }
  std::vector<Unit*> units_named(const std::vector<std::string>& names) const;  // all units if `names` is empty
  CollectiveLog& log() { return log_; }
  OffloadedMemory& offload() { return offload_; }
  bool offloads_gradients(const Unit& unit) const {
    return options_.offload.grads && !offload_.is_kept_on_device(unit.index());
  }
  std::string rank_text() const { return std::to_string(mesh_.world->rank()); }  // for errors

  // Returns all parameters, ordered by unit, then by flat parameter. A gradient's index is a position in this list.
  std::vector<PlannedParameter> parameters() const;

  const std::vector<NamedShard>& named_shards() const { return named_shards_; }
  std::vector<ModelShards::HeldPart> held_by(int rank) const;  // the parts of named_shards() on `rank`
  // Returns the parameters of ignored modules, which stay unsharded. Lists a tied parameter under each of its names.
  const torch::OrderedDict<std::string, at::Tensor>& ignored_parameters() const { return ignored_parameters_; }
  const CastBuffers& cast_buffers() const { return cast_buffers_; }

  using VisitState =
      std::function<void(const std::string& name, const std::vector<std::string>& aliases, const at::Tensor& tensor)>;
  // Calls visit() for each full parameter in its own dtype, then for each buffer (rank0_only: on rank 0 only). Values
  // of summoned units include the user's changes. Collective. Gathers one flat parameter at a time.
  void visit_full_state(const VisitState& visit, const StateDictOptions& options);

  MemoryReport memory() const;  // excludes buckets of gradients
  void reset_peak_memory();
  void describe(std::ostream& text) const;  // writes a line for each flat parameter

 private:
  // Returns the options of each unit. With offload.params, allocates all offloaded shards, and is collective.
  std::vector<FlatParameterOptions> reserve_shards(const std::vector<PlannedUnit>& plan,
                                                   const FlatParameterOptions& common);
  void make_units(std::vector<PlannedUnit>& plan, Pager* pager);
  void name_shards();

  const FsdpOptions options_;
  const Mesh mesh_;
  const std::shared_ptr<torch::nn::Module> module_;
  CountedBuffers gathered_;
  CountedBuffers secondary_;
  OffloadedMemory offload_;
  CollectiveLog log_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<NamedShard> named_shards_;
  struct InLayout {
    const FlatLayout* layout;
    int64_t parameter;
  };
  std::vector<InLayout> in_layouts_;  // for each entry of named_shards_: its place in its layout
  torch::OrderedDict<std::string, at::Tensor> ignored_parameters_;
  CastBuffers cast_buffers_;
};

}  // namespace tessera::internal
