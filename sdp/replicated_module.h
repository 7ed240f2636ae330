#pragma once

#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/flat/memory_report.h"
#include "tessera/flat/model_shards.h"
#include "tessera/flat/unit_plan.h"
#include "tessera/trace/trace.h"

namespace tessera {

// A module whose parameters every rank holds in full: what DistributedDataParallel and
// ShardedDataParallel have in common.
class ReplicatedModule : public ModelShards {
 public:
  ReplicatedModule(const ReplicatedModule&) = delete;
  ReplicatedModule& operator=(const ReplicatedModule&) = delete;

  // The module's own parameters, each once, in the module's order.
  std::vector<at::Tensor> parameters() const;
  torch::OrderedDict<std::string, at::Tensor> named_parameters() const;

  // All parameters (under each of their names) and buffers by name, as copies. Not collective.
  torch::OrderedDict<std::string, at::Tensor> full_state_dict() const;

  // Clears the parameters' gradients: optimizer.zero_grad() does it too.
  void zero_grad(bool set_to_none = true);

  const std::shared_ptr<Communicator>& comm() const override { return comm_; }
  std::vector<NamedShard> named_shards() const override;
  torch::OrderedDict<std::string, at::Tensor> named_buffers() const override;

 protected:
  // Checks that all ranks have the same module and `options` (a line of text), and takes rank 0's
  // parameters and buffers if `sync`. Collective. Throws std::invalid_argument, on every rank and
  // with the first difference by name, if ranks differ, and for parameters that are not on the
  // communicator's device or are sharded already. `wrapper` is its name, for errors.
  ReplicatedModule(torch::nn::Module& module, std::shared_ptr<Communicator> comm, const std::string& wrapper,
                   const std::string& options, bool sync);

  // Buffers <- rank 0's. Collective.
  void broadcast_buffers();
  bool has_buffers() const;
  // Bytes of parameters and of the gradients that are defined now.
  MemoryReport memory_of_replica() const;
  const std::vector<PlannedParameter>& planned_parameters() const { return parameters_; }

  // Spans of the trace, if there is one: forward from the first call to the second, backward from the
  // first gradient of one of these tensors until it is over.
  void trace_forward_begins() {
    if (Trace::active() != nullptr) forward_since_ = Trace::Clock::now();
  }
  void trace_forward_ends(const std::vector<at::Tensor>& outputs) const {
    if (Trace::active() != nullptr) trace_passes(outputs);
  }

 private:
  void trace_passes(const std::vector<at::Tensor>& outputs) const;

  const std::shared_ptr<torch::nn::Module> module_;
  const std::shared_ptr<Communicator> comm_;
  std::vector<PlannedParameter> parameters_;
  Trace::Clock::time_point forward_since_;
};

}  // namespace tessera
