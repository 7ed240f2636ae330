#pragma once

#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/flat/memory_report.h"
#include "tessera/flat/mesh.h"
#include "tessera/flat/model_shards.h"
#include "tessera/flat/order_log.h"
#include "tessera/fsdp/full_parameters.h"
#include "tessera/fsdp/options.h"
#include "tessera/fsdp/unit.h"
#include "tessera/memory/counted_buffers.h"
#include "tessera/memory/pinned_pool.h"
#include "tessera/offload/copy_engine.h"
#include "tessera/paging/disk_pager.h"

namespace tessera {

// A module in shards: its units, the names that their parts go by, its state and what it takes. What is resident when
// is the Scheduler's business, gradients are ShardedGradients'.
class ShardedModel {
 public:
  // Plans units, checks that all ranks agree, and shards the module. Collective. `pager` is told of uses of parameters.
  ShardedModel(torch::nn::Module& module, std::shared_ptr<Communicator> comm, const FsdpOptions& options, Pager* pager);

  const FsdpOptions& options() const { return options_; }
  const Mesh& mesh() const { return mesh_; }
  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  std::vector<std::unique_ptr<Unit>>& units() { return units_; }
  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }
  std::vector<Unit*> units_named(const std::vector<std::string>& names) const;  // empty: all
  OrderLog& log() { return log_; }
  CopyEngine* copies() const { return copies_.get(); }  // null without offload
  CountedBuffers& staging() { return staging_; }
  bool has_disk() const { return disk_ != nullptr; }

  // All parameters, unit by unit and group by group: the order in which gradients know them.
  std::vector<PlannedParameter> parameters() const;

  const std::vector<NamedShard>& named_shards() const { return named_shards_; }
  torch::OrderedDict<std::string, at::Tensor> named_buffers() const;

  // Calls visit() for each parameter in full, then for each buffer, in the parameters' own dtypes. Units that are
  // pinned are shown as they are now. Collective.
  using VisitState =
      std::function<void(const std::string& name, const std::vector<std::string>& aliases, const at::Tensor& tensor)>;
  void visit_full_state(const VisitState& visit, const StateDictOptions& options);
  torch::OrderedDict<std::string, at::Tensor> full_state_dict(const StateDictOptions& options);

  MemoryReport memory() const;  // without buckets of gradients
  void reset_peak_memory();
  void describe(std::ostream& text) const;  // a line for each group of each unit

 private:
  void check_agreement(const std::vector<PlannedUnit>& plan) const;
  void make_units(std::vector<PlannedUnit>& plan, Pager* pager);
  FlatGroupOptions::Memory host_memory(const char* purpose);
  FlatGroupOptions::Memory shard_memory(const std::string& unit);
  void cast_buffers();
  void name_shards();

  const FsdpOptions options_;
  const Mesh mesh_;
  const std::shared_ptr<torch::nn::Module> module_;
  CountedBuffers gathered_;
  CountedBuffers staging_;              // with offload: shards and reduced gradients on their way
  PinnedPool host_;                     // with offload: where they lie
  std::unique_ptr<DiskPager> disk_;     // null without a directory
  std::unique_ptr<CopyEngine> copies_;  // null without offload
  OrderLog log_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<NamedShard> named_shards_;
  std::map<std::string, at::ScalarType> cast_buffers_;  // their dtype before, by name
};

}  // namespace tessera
