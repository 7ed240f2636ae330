#pragma once

#include <ATen/core/ScalarType.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <tessera/communicator.h>
#include <tessera/model/grad_norm.h>
#include <tessera/model/model_shards.h>
#include <tessera/optim/averages.h>
#include <tessera/optim/optimizer_state_dict.h>
#include <tessera/options/offload_options.h>

namespace tessera {

// Options of OSS. Must be equal on all ranks, except for limits of memory.
struct OssOptions {
  // The dtype in which owners send updated parameters. kHalf and kBFloat16 halve the bytes of fp32 parameters. The
  // owner keeps exact values as a master copy. Other ranks receive rounded values, like FairScale's broadcast_fp16.
  // Empty: the parameters' own dtype, so that all ranks hold the same bits.
  std::optional<at::ScalarType> broadcast_dtype{};

  // Parameters of less than 1 MiB share buckets of up to this many bytes. 0: every parameter has its own bucket.
  int64_t broadcast_bucket_bytes = int64_t{16} << 20;

  // For debugging. N > 0: compares all ranks' parameters after every N-th step. Throws std::runtime_error with the
  // first difference. 0: never, unless TESSERA_DEBUG is replicas (N = 100) or replicas:N. Always off if broadcast_dtype
  // is set.
  int64_t compare_replicas_every = 0;

  // With `params` or `grads`, the step runs in host memory: it copies gradients to the host, and new values back to the
  // device. HostAdam and HostAdamW step some parameters while others are copied. Other optimizers do not overlap copies
  // with the step.
  OffloadOptions offload{};
};

class Lbfgs;
namespace internal {
class CapturedWork;
class HostStep;
class LateReports;
class ParameterBuckets;
struct Partition;
class ReplicaComparison;
class SingleThreadChecker;
}  // namespace internal

// The base class of OSS, independent of the optimizer's class: a torch::optim::Optimizer that has the groups of all
// ranks' parameters. step() updates the parameters that this rank owns, and then publishes them to all ranks. state()
// holds the states of owned parameters. Must be used by one thread at a time. If a second thread makes a call that
// changes this object during another such call, the second call throws std::logic_error, and the first call continues.
class ShardedOptimizer : public torch::optim::Optimizer, public internal::OptimizerShards, public Averages {
 public:
  ~ShardedOptimizer() override;

  // Each rank steps the parameters that it owns, and then sends them to all ranks. Collective. Calls `closure`, if any,
  // once to compute the gradients, and returns its loss. Lbfgs calls the closure at each point of a line search, on all
  // ranks at once. Uses the current options of param_groups(). Throws CommError. Throws std::logic_error, with nothing
  // changed, if averages are swapped in. Also throws it if gradients are not averages: the last backward failed or ran
  // under no_sync(). With several ranks, also throws it if a parameter was converted after it was added.
  at::Tensor step(LossClosure closure = nullptr) override;

  // Adds a group; earlier parameters keep their owners. Collective. Throws like OSS's constructors, with nothing
  // changed.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  // Like torch::nn::utils::clip_grad_norm_(), over all parameters. The gradients must be averages over ranks, as
  // DistributedDataParallel and ShardedDataParallel make them. Each parameter counts once, at its owner. Returns the
  // norm before clipping. Collective: one all-reduce of one number. Throws like the wrappers' clip_grad_norm_(). If
  // gradients are not averages, throws like step().
  double clip_grad_norm_(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false) {
    return clip_grad_norm_on_device_(max_norm, norm_type, error_if_nonfinite);
  }
  // Like clip_grad_norm_(), but does not block until the device has computed the norm.
  GradNorm clip_grad_norm_on_device_(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false);

  // While the scope exists, the parameters hold averages. Only for optimizers that keep averages (ScheduleFreeAdamW).
  // Collective. Throws std::logic_error for other optimizers, and while such a scope is open.
  ScopeExit swap_in_averages() override;
  bool keeps_averages() const override;  // whether the optimizer keeps averages
  bool are_swapped_in() const override;  // whether a scope of swap_in_averages() is open

  const std::vector<int64_t>& owned_bytes() const;  // bytes of trained parameters that each rank owns, by rank
  bool has(const at::Tensor& parameter) const;      // whether the tensor is a parameter that any rank owns
  // Returns the rank that owns the parameter. Throws std::invalid_argument if the parameter is not in the optimizer. If
  // the base class's add_param_group() added the parameter, throws std::logic_error until a step, clipping or
  // consolidation.
  int owner(const at::Tensor& parameter) const;
  bool rounds_copies() const { return options_.broadcast_dtype.has_value(); }  // true: only owners have exact values
  const std::shared_ptr<Communicator>& comm() const { return comm_; }          // the constructor's communicator
  std::weak_ptr<const void> lifetime() const { return calls_; }                // expires with this object; for wrappers
  // If OssOptions::offload is on, returns the bytes of host memory that copies of parameters and gradients use now;
  // otherwise 0. Excludes the optimizer's state.
  int64_t host_bytes() const;
  // Returns host_bytes() with OffloadOptions::pin_memory, otherwise 0. On CPUs, this memory is not page-locked.
  int64_t pinned_bytes() const;

  // Collects the state of all parameters in the host memory of `rank`, for state_dict() and save() there. If `rank` is
  // -1, collects it on every rank. Collective.
  void consolidate_state_dict(int rank = 0);
  // Returns the state of the last consolidate_state_dict(). Throws std::logic_error if there is none. load_state_dict()
  // and load() discard it.
  const OptimizerStateDict& state_dict() const;
  // Returns the states of the parameters that this rank owns. The tensors are the optimizer's own, not copies.
  OptimizerStateDict local_state_dict() const;
  // Restores options and states from a complete dictionary, which may come from another world size. Each rank copies
  // its own part. Not collective; all ranks must pass equal dictionaries. Throws std::invalid_argument, with nothing
  // changed, if the dictionary does not fit the optimizer. Also throws like owner().
  void load_state_dict(const OptimizerStateDict& dict);

  // For torch::save: writes the state of all parameters in the format of the optimizer itself, so that Adam can load a
  // file of OSS<Adam>. Must be called after consolidate_state_dict(), on a rank that collected the state.
  void save(torch::serialize::OutputArchive& archive) const override;
  // For torch::load: reads a file of save(). Throws like load_state_dict().
  void load(torch::serialize::InputArchive& archive) override;

  const torch::optim::Optimizer& local() const override { return *local_; }  // steps the parameters of this rank
  // Whether this rank owns the parameter.
  bool owns(const at::Tensor& parameter) const override { return owner(parameter) == comm_->rank(); }
  // Returns the owner's new `values` as this rank receives them: rounded if broadcast_dtype is set.
  at::Tensor as_received(const at::Tensor& parameter, const at::Tensor& values) const override;

 protected:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  using Factory = std::function<std::unique_ptr<torch::optim::Optimizer>(Groups)>;
  // Returns the cost of stepping one parameter; must be equal on all ranks. Parameters with cost > 0 are assigned
  // first, balanced by cost; all others are balanced by bytes. A null StepCost balances all parameters by bytes.
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
  bool is_added(const at::Tensor& parameter) const;  // true: added by the base class, and without an owner yet
  void assign_owners(size_t first_group);
  torch::optim::OptimizerParamGroup owned_part(const torch::optim::OptimizerParamGroup& group) const;
  void copy_options(torch::optim::Optimizer& to) const;
  ScopeExit lend_state();
  at::Tensor search(Lbfgs& lbfgs, const LossClosure& closure);
  void step_owned();
  void add_recorded_step(internal::CapturedWork& work);
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
  std::vector<int64_t> owned_costs_;                           // by rank: sum of step_cost_ of owned parameters
  std::unique_ptr<torch::optim::Optimizer> local_;             // its states are in state() between steps
  const std::unique_ptr<internal::LateReports> late_reports_;  // on a device: unread comparisons of earlier steps
  std::unique_ptr<internal::HostStep> host_;                   // null without offload
  std::vector<std::unique_ptr<internal::ParameterBuckets>> buckets_;  // one object for each call that added groups
  std::optional<OptimizerStateDict> consolidated_;
  const std::shared_ptr<internal::SingleThreadChecker> calls_;
};

}  // namespace tessera
