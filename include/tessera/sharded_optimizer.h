#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <tessera/communicator.h>
#include <tessera/model/grad_norm.h>
#include <tessera/model/model_shards.h>
#include <tessera/optim/averages.h>
#include <tessera/optim/optimizer_state_dict.h>
#include <tessera/options/oss_options.h>

namespace tessera {

class Lbfgs;
namespace internal {
class HostStep;
class LateReports;
class ParameterBuckets;
struct Partition;
class ReplicaComparison;
}  // namespace internal

// All of OSS that does not depend on the optimizer's class. It is a torch::optim::Optimizer over all parameters, with
// all groups and options, but its step() updates only those that this rank owns; then each rank sends its parameters to
// all others. state() has what it keeps of those. Everything is used by one thread at a time.
class ShardedOptimizer : public torch::optim::Optimizer, public internal::OptimizerShards, public Averages {
 public:
  ~ShardedOptimizer() override;

  // One step with the gradients that the owners have, then the exchange of parameters. Collective. `closure`, if any,
  // computes the gradients again, once, and its loss is returned; Lbfgs calls it at each point of a search, when all
  // ranks are there. Options of the groups (learning rates) are those of param_groups() now. Throws std::logic_error,
  // before anything is changed, where the gradients cannot be meant for a step (made under no_sync() alone, or by a
  // backward that failed), while averages are swapped in and, in a world above 1, for a parameter that was converted
  // since it came; CommError.
  at::Tensor step(LossClosure closure = nullptr) override;

  // Collective, as construction. The parameters of earlier groups keep their owners.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  // torch::nn::utils::clip_grad_norm_ over all parameters: gradients that DistributedDataParallel
  // or ShardedDataParallel have averaged. Each parameter counts once, at its owner. Returns the norm
  // before. Collective: one all-reduce of one number. Throws as clip_shards_by_norm(), and as step() for gradients.
  double clip_grad_norm_(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false) {
    return clip_grad_norm_on_device_(max_norm, norm_type, error_if_nonfinite);
  }
  // The same without waiting for a device to compute the norm.
  GradNorm clip_grad_norm_on_device_(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false);

  // Of an optimizer that keeps averages (ScheduleFreeAdamW): the parameters have their values while the scope lives.
  // Collective. Throws std::logic_error for any other optimizer.
  ScopeExit swap_in_averages() override;
  bool keeps_averages() const override;  // whether the optimizer is such a one
  bool are_swapped_in() const override;

  // Who owns what: parameters counted through all groups. Frozen ones weigh nothing.
  const internal::Partition& partition() const { return *partition_; }
  // Whether the tensor is one of this optimizer's parameters, on whichever rank its state is.
  bool has(const at::Tensor& parameter) const;
  // The rank that owns the parameter; std::invalid_argument if it is none of this optimizer's, std::logic_error if the
  // base class's add_param_group() has added it, and neither a step, clipping nor consolidating has come since.
  int owner(const at::Tensor& parameter) const;
  // Whether other ranks' copies of a parameter are its owner's values rounded (OssOptions::broadcast_dtype).
  bool rounds_copies() const { return options_.broadcast_dtype.has_value(); }
  // The group that the optimizer was made with.
  const std::shared_ptr<Communicator>& comm() const { return comm_; }
  // Expires with this object: for wrappers that refer to it.
  std::weak_ptr<const void> lifetime() const { return lifetime_; }
  // Host memory for copies of parameters and for gradients, with OssOptions::offload, in bytes now. The
  // optimizer's own state comes on top.
  int64_t host_bytes() const;
  // What of host_bytes() is page-locked.
  int64_t pinned_bytes() const;

  // Sends the whole state to `rank`, in host memory, where state_dict() then returns it and save()
  // writes it; -1: to every rank. Collective.
  void consolidate_state_dict(int rank = 0);
  // What the last consolidate_state_dict() brought, as of then. Throws std::logic_error on a rank
  // that got nothing.
  const OptimizerStateDict& state_dict() const;
  // This rank's part: states of the parameters it owns; tensors are the optimizer's own.
  OptimizerStateDict local_state_dict() const;
  // Takes options and states from a whole dictionary, whatever world size it comes from; each rank
  // keeps (a copy of) its own part. Not collective; give every rank the same. Throws
  // std::invalid_argument with nothing changed if the dictionary does not fit, and as owner().
  void load_state_dict(const OptimizerStateDict& dict);

  // torch::save and torch::load of the whole state, in the format of the optimizer itself: a file
  // of OSS<Adam> is one of Adam. save() after consolidate_state_dict().
  void save(torch::serialize::OutputArchive& archive) const override;
  // As load_state_dict(), with what save() has written.
  void load(torch::serialize::InputArchive& archive) override;

  const torch::optim::Optimizer& local() const override { return *local_; }
  bool owns(const at::Tensor& parameter) const override { return owner(parameter) == comm_->rank(); }
  at::Tensor as_received(const at::Tensor& parameter, const at::Tensor& values) const override;

 protected:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  using Factory = std::function<std::unique_ptr<torch::optim::Optimizer>(Groups)>;
  // What a step of a parameter costs, the same on all ranks, where that is not its bytes: those of more than 0 are
  // shared out by it before the others are by bytes. Null: by bytes all.
  using StepCost = std::function<int64_t(const NamedShard&, const torch::optim::OptimizerOptions&)>;
  ShardedOptimizer(Groups groups, std::unique_ptr<torch::optim::OptimizerOptions> defaults, Factory make,
                   std::shared_ptr<Communicator> comm, OssOptions options, StepCost step_cost = nullptr);

 private:
  struct Ownership {
    int64_t index;
    int owner;
  };
  void check_agreement(size_t first_group) const;
  void adopt_groups_from(size_t first_group);
  void take_added_groups();
  bool is_added(const at::Tensor& parameter) const;  // by the base class, and not taken yet
  void weigh(size_t first_group);
  torch::optim::OptimizerParamGroup owned_part(const torch::optim::OptimizerParamGroup& group) const;
  void copy_options(torch::optim::Optimizer& to) const;
  ScopeExit lend_state();
  at::Tensor search(Lbfgs& lbfgs, const LossClosure& closure);
  void step_owned();
  void publish(const std::function<void(const std::vector<at::Tensor>& parameters)>& step_owned = nullptr);
  std::vector<at::Tensor> owned_gradients() const;
  std::vector<at::Tensor> all_parameters() const;
  std::string label_of(const at::Tensor& parameter) const;

  const std::shared_ptr<Communicator> comm_;
  const OssOptions options_;
  const Factory make_;
  const StepCost step_cost_;
  const std::unique_ptr<internal::ReplicaComparison> comparison_;
  std::unordered_map<const c10::TensorImpl*, Ownership> ownership_;
  const std::unique_ptr<internal::Partition> partition_;
  std::vector<int64_t> owned_costs_;                // by rank, of step_cost_
  std::unique_ptr<torch::optim::Optimizer> local_;  // its state is here while it does not step, for users to find
  const std::unique_ptr<internal::LateReports> late_reports_;         // of steps before, on a device
  std::unique_ptr<internal::HostStep> host_;                          // null without offload
  std::vector<std::unique_ptr<internal::ParameterBuckets>> buckets_;  // one for each time that groups came
  std::optional<OptimizerStateDict> consolidated_;
  const std::shared_ptr<const void> lifetime_ = std::make_shared<int>();
};

}  // namespace tessera
