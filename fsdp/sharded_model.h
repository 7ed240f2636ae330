#pragma once

#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <map>
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
#include "fsdp/offloaded_memory.h"
#include "fsdp/unit.h"

namespace tessera::internal {

// A module in shards: its units, the names that their parts go by, and what it takes. What is resident when
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
  std::vector<Unit*> units_of(const std::vector<Page*>& pages) const;           // each once
  CollectiveLog& log() { return log_; }
  OffloadedMemory& offload() { return offload_; }
  std::string rank_text() const { return std::to_string(mesh_.world->rank()); }  // for errors

  // All parameters, flat parameter by flat parameter, unit by unit: the order in which gradients know them.
  std::vector<PlannedParameter> parameters() const;

  const std::vector<NamedShard>& named_shards() const { return named_shards_; }
  std::vector<HeldPart> held_by(int rank) const;  // of named_shards()
  // Parameters of ignored modules, whole on every rank, under each of their names.
  const torch::OrderedDict<std::string, at::Tensor>& ignored_parameters() const { return ignored_parameters_; }
  // Buffers that were cast, and the dtypes that they had before, by name.
  struct CastBuffer {
    at::Tensor tensor;
    at::ScalarType own;
  };
  const std::map<std::string, CastBuffer>& cast_buffers() const { return cast_buffers_; }
  // Throws std::logic_error, naming it, for one that torch::load() has given the bytes of its own dtype.
  void require_cast_buffers() const;

  MemoryReport memory() const;  // without buckets of gradients
  void reset_peak_memory();
  void describe(std::ostream& text) const;  // a line for each flat parameter of each unit

 private:
  void check_agreement(const std::vector<PlannedUnit>& plan) const;
  void warn_if_short_of_memory(const std::vector<PlannedUnit>& plan) const;
  void warn_of_idle_policies(const std::vector<PlannedUnit>& plan) const;
  void make_units(std::vector<PlannedUnit>& plan, Pager* pager);
  void cast_buffers(at::ScalarType dtype);
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
  std::vector<InLayout> in_layouts_;  // of named_shards_
  torch::OrderedDict<std::string, at::Tensor> ignored_parameters_;
  std::map<std::string, CastBuffer> cast_buffers_;
};

}  // namespace tessera::internal
