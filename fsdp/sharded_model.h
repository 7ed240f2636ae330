#pragma once

#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

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
#include "fsdp/cast_buffers.h"
#include "fsdp/unit.h"
#include "offload/offloaded_memory.h"

namespace tessera::internal {

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
  // Calls visit() for each full parameter in its own dtype, then for each buffer. Values of summoned units include the
  // user's changes. Collective. Gathers at most one unit at a time.
  void visit_full_state(const VisitState& visit, const StateDictOptions& options);

  MemoryReport memory() const;  // excludes buckets of gradients
  void reset_peak_memory();
  void describe(std::ostream& text) const;  // writes a line for each flat parameter

 private:
  // Returns the options of each unit. Their memory functions return memory that is allocated already. Collective.
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
