#pragma once

#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <tessera/communicator.h>
#include <tessera/model/data_parallel.h>
#include <tessera/scope_exit.h>
#include <tessera/visit_tensors.h>

namespace tessera::internal {

class ReplicatedGradients;
struct PlannedParameter;
struct ReplicatedOptions;

// A module whose parameters are whole on every rank. Base class of DistributedDataParallel and ShardedDataParallel.
class ReplicatedModule : public DataParallel {
 public:
  ReplicatedModule(const ReplicatedModule&) = delete;
  ReplicatedModule& operator=(const ReplicatedModule&) = delete;

  // Note: parameters() returns the parameters of the module and its submodules, each once, in the module's order.

  // Returns copies of all parameters (under each of their names) and buffers, by name. Not collective. Throws CommError
  // if a collective of this group was aborted, because values may then be undefined.
  torch::OrderedDict<std::string, at::Tensor> full_state_dict() const;

  // Counts parameters, buckets, and gradients except placeholders. Counts gradients that are in a bucket only once.
  MemoryReport memory() const override;
  void reset_peak_memory() override;

  const std::shared_ptr<Communicator>& comm() const override { return comm_; }
  std::vector<NamedShard> named_shards() const override;
  std::vector<NamedShard> shards_to_save() const override;
  torch::OrderedDict<std::string, at::Tensor> named_buffers() const override;

 protected:
  struct Setup {
    std::string wrapper;             // class name of the wrapper, for errors
    std::string options;             // text of the options in one line; must be equal on all ranks
    bool sync_module_states = true;  // true: rank 0 sends its parameters and buffers
    // true: after a training forward outside no_sync(), the next forward first sends rank 0's buffers to all ranks.
    bool broadcast_buffers = true;
    // true: gradients from before wrapping must be equal on all ranks, because each rank steps with its own gradients.
    bool compares_gradients = false;
  };
  // Checks that all ranks have equal modules and options. Collective. If ranks differ, throws std::invalid_argument on
  // every rank, with the name of the first difference. Also throws for a parameter that a wrapper cannot train.
  ReplicatedModule(torch::nn::Module& module, std::shared_ptr<Communicator> comm, Setup setup);
  ~ReplicatedModule() override;
  // Must be called at the end of construction. Creates gradients(). `owner_of` returns the rank that receives a reduced
  // gradient; null: all ranks receive it.
  void reduce_gradients(std::function<int(const PlannedParameter&)> owner_of, const ReplicatedOptions& options);
  ReplicatedGradients& gradients() const { return *gradients_; }

  // Calls begin_forward(), module->forward(args...) and end_forward(). Returns forward's result.
  template <class Holder, class... Args>
  auto run_forward(Holder& module, Args&&... args) {
    const ScopeExit forward_goes_on = begin_forward();
    if constexpr (std::is_void_v<decltype(module->forward(std::forward<Args>(args)...))>) {
      module->forward(std::forward<Args>(args)...);
      end_forward({});
    } else {
      auto output = module->forward(std::forward<Args>(args)...);
      end_forward(tensors_of(output));
      return output;
    }
  }

  const std::vector<PlannedParameter>& planned_parameters() const { return parameters_; }

 private:
  BackwardPass& backward_pass() const override;
  ScopeExit begin_forward();  // the scope must live until forward ends
  void end_forward(const std::vector<at::Tensor>& outputs);
  void broadcast_buffers();
  void trace_passes(const std::vector<at::Tensor>& outputs) const;

  const std::shared_ptr<torch::nn::Module> module_;
  const std::shared_ptr<Communicator> comm_;
  const Setup setup_;
  std::vector<PlannedParameter> parameters_;
  std::shared_ptr<ReplicatedGradients> gradients_;
  std::chrono::steady_clock::time_point forward_since_;
};

}  // namespace tessera::internal
