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

// A module whose parameters every rank holds in full: the base of DistributedDataParallel and ShardedDataParallel.
class ReplicatedModule : public DataParallel {
 public:
  ReplicatedModule(const ReplicatedModule&) = delete;
  ReplicatedModule& operator=(const ReplicatedModule&) = delete;

  // parameters() returns the module's own parameters, each once, in the module's order.

  // Copies of all parameters (under each of their names) and buffers, by name. Not collective. Throws CommError if a
  // collective that computed them was aborted.
  torch::OrderedDict<std::string, at::Tensor> full_state_dict() const;

  // Bytes of parameters, of defined gradients, and of buckets that are not gradients themselves.
  MemoryReport memory() const override;
  void reset_peak_memory() override;

  const std::shared_ptr<Communicator>& comm() const override { return comm_; }
  std::vector<NamedShard> named_shards() const override;
  std::vector<NamedShard> shards_to_save() const override;
  torch::OrderedDict<std::string, at::Tensor> named_buffers() const override;

 protected:
  struct Setup {
    std::string wrapper;             // the class name, for errors
    std::string options;             // a line of text; must be equal on all ranks
    bool sync_module_states = true;  // takes rank 0's parameters and buffers
    bool broadcast_buffers = true;   // from rank 0, before each forward that follows a training forward
    // true: compares gradients from before wrapping, which must be equal because every rank steps with its own.
    bool compares_gradients = false;
  };
  // Checks that all ranks have the same module and options. Collective. Throws std::invalid_argument, on every rank and
  // with the first difference by name, if ranks differ, and if a parameter cannot be trained by wrappers.
  ReplicatedModule(torch::nn::Module& module, std::shared_ptr<Communicator> comm, Setup setup);
  ~ReplicatedModule() override;
  // The last part of construction: sets the owners of gradients (see ReplicatedGradients).
  void reduce_gradients(std::function<int(const PlannedParameter&)> owner_of, const ReplicatedOptions& options);
  ReplicatedGradients& gradients() const { return *gradients_; }

  // Returns the result of module->forward(args...), called between begin_forward() and end_forward().
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
  const torch::nn::Module& wrapped_module() const override { return *module_; }
  ScopeExit begin_forward();  // must live until forward ends
  void end_forward(const std::vector<at::Tensor>& outputs);
  void broadcast_buffers();
  void trace_passes(const std::vector<at::Tensor>& outputs) const;

  const std::shared_ptr<torch::nn::Module> module_;
  const std::shared_ptr<Communicator> comm_;
  const Setup setup_;
  std::vector<PlannedParameter> parameters_;
  std::shared_ptr<ReplicatedGradients> gradients_;
  bool last_forward_trained_ = false;
  std::chrono::steady_clock::time_point forward_since_;
};

}  // namespace tessera::internal
