#include <tessera/sharded_optimizer.h>

#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <span>
#include <sstream>
#include <stdexcept>
#include <unordered_set>

#include <tessera/detail/parameter_parts.h>
#include <tessera/host_results.h>
#include <tessera/optim/lbfgs.h>
#include <tessera/optim/partial_step.h>
#include "core/comm/agreement.h"
#include "core/comm/reduced_report.h"
#include "core/comm/single_thread_checker.h"
#include "core/layout/geometry.h"
#include "core/layout/partition.h"
#include "core/layout/shardable.h"
#include "core/model/replica_comparison.h"
#include "core/model/shard_norm.h"
#include "core/model/step_check.h"
#include "core/runtime/dtypes.h"
#include "core/runtime/graph_recorder.h"
#include "core/runtime/no_grad_no_inference_guard.h"
#include "core/runtime/require.h"
#include "core/trace/trace.h"
#include "optim/host/fused_kernels.h"
#include "optim/host/host_step.h"
#include "optim/state/optimizer_state.h"
#include "oss/parameter_buckets.h"

namespace tessera {
using namespace internal;
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

// Returns the parameters without duplicates, named by group and index, because an optimizer does not know their names.
std::vector<PlannedParameter> parameters_of(std::span<const OptimizerParamGroup> groups) {
  std::vector<PlannedParameter> parameters;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (size_t group = 0; group < groups.size(); ++group)
    for (size_t i = 0; i < groups[group].params().size(); ++i)
      if (const at::Tensor& parameter = groups[group].params()[i]; seen.insert(parameter.unsafeGetTensorImpl()).second)
        parameters.push_back({std::to_string(i) + " of group " + std::to_string(group), {}, parameter});
  return parameters;
}

const std::vector<OptimizerParamGroup>& checked(const std::vector<OptimizerParamGroup>& groups,
                                                const Communicator* comm) {
  if (comm == nullptr) throw std::invalid_argument("OSS: the communicator is null");
  require_shardable(parameters_of(groups), *comm, "OSS");
  return groups;
}

// Returns the geometry of a state tensor in a state dictionary. A state with one value for each element has the
// parameter's strides. States for blocks, rows or columns are 1-D.
ParameterGeometry state_geometry(const std::string& name, const at::Tensor& parameter) {
  if (form_of_state(name) == StateForm::kElements) return geometry_of(parameter);
  return {state_sizes(name, parameter.sizes().vec()), {1}};
}

// Returns one line for each number and tensor of the states. A receiving rank allocates tensors from these lines.
std::string describe_states(const std::map<int64_t, ParameterState>& states) {
  std::ostringstream text;
  for (const auto& [index, state] : states) {
    for (const auto& [name, number] : state.numbers) text << "number " << index << ' ' << name << ' ' << number << '\n';
    for (const auto& [name, tensor] : state.tensors)
      text << "tensor " << index << ' ' << name << ' ' << static_cast<int>(tensor.scalar_type()) << '\n';
  }
  return text.str();
}

SingleThreadChecker::OnlyCall begin_call(SingleThreadChecker& calls, const Communicator& comm, const char* what) {
  return {calls, what, [&] { return "OSS on rank " + std::to_string(comm.rank()); }};
}

}  // namespace

// ---- groups and owners -------------------------------------------------------------------------

ShardedOptimizer::ShardedOptimizer(Groups groups, std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                   Factory make, std::shared_ptr<Communicator> comm, OssOptions options,
                                   StepCost step_cost)
    : Optimizer(checked(groups, comm.get()), std::move(defaults)),
      comm_(std::move(comm)),
      options_(options),
      make_(std::move(make)),
      step_cost_(std::move(step_cost)),
      comparison_(std::make_unique<ReplicaComparison>(options.compare_replicas_every)),
      partition_(std::make_unique<Partition>()),
      late_reports_(std::make_unique<LateReports>()),
      calls_(std::make_shared<SingleThreadChecker>()) {
  require(dynamic_cast<const torch::optim::LBFGSOptions*>(&this->defaults()) == nullptr,
          "OSS<torch::optim::LBFGS>: LBFGS searches along one direction for all parameters together, and each rank "
          "would search along its own; use tessera::Lbfgs");
  require(dynamic_cast<const LbfgsOptions*>(&this->defaults()) == nullptr ||
              (!options_.broadcast_dtype && !options_.offload.params && !options_.offload.grads),
          "OSS<Lbfgs> with OssOptions::broadcast_dtype or offload: each point of a line search would be rounded, or "
          "travel to the host and back; use FullyShardedDataParallel with offload");
  require_training_dtype("OssOptions::broadcast_dtype", options_.broadcast_dtype);
  require(options_.broadcast_bucket_bytes >= 0, "OssOptions::broadcast_bucket_bytes is ",
          options_.broadcast_bucket_bytes, ", expected 0 or more");
  if (options_.offload.device_fraction != 0)
    throw std::invalid_argument(c10::str("OssOptions::offload.device_fraction is ", options_.offload.device_fraction,
                                         ", but only FullyShardedDataParallel keeps units on the device, expected 0"));
  require(options_.offload.directory.empty() && !options_.offload.disk_units, "OssOptions::offload.directory is '",
          options_.offload.directory,
          "' or disk_units is set, but only FullyShardedDataParallel keeps shards on a disk");
  if (const OffloadOptions& offload = options_.offload; offload.params || offload.grads)
    host_ = std::make_unique<HostStep>(
        make_, HostStepOptions{{comm_->device(), offload.pin_memory, offload.host_limit_bytes},
                               offload.grads,
                               [this](const at::Tensor& parameter) { return label_of(parameter); }});
  restore_options(param_groups_, 0, groups);
  adopt_groups_from(0);
}

ShardedOptimizer::~ShardedOptimizer() = default;

void ShardedOptimizer::check_agreement(size_t first_group) const {
  std::vector<std::string> lines;
  lines.push_back(
      c10::str("options: ", c10::demangle(typeid(*defaults_).name()),
               " broadcast_dtype=", options_.broadcast_dtype ? c10::toString(*options_.broadcast_dtype) : "none",
               " broadcast_bucket_bytes=", options_.broadcast_bucket_bytes, " offload.params=", host_ != nullptr,
               " offload.grads=", options_.offload.grads, " compare_replicas_every=", comparison_->every()));
  for (size_t group = first_group; group < param_groups_.size(); ++group) {
    lines.push_back("options of group " + std::to_string(group) + ": " + text_of(param_groups_[group].options()));
    for (size_t i = 0; i < param_groups_[group].params().size(); ++i) {
      const at::Tensor& parameter = param_groups_[group].params()[i];
      lines.push_back(c10::str("parameter ", i, " of group ", group, ": ", parameter.scalar_type(), " ",
                               parameter.sizes(),
                               parameter.requires_grad() ? ""
                               : is_stepped(parameter)   ? " frozen, with a gradient"
                                                         : " frozen"));
    }
  }
  require_agreement(*comm_, "the parameters of an optimizer", lines);
}

void ShardedOptimizer::adopt_groups_from(size_t first_group) {
  const NoGradNoInferenceGuard quiet;  // buckets' memory, and so their parameters, must not be inference tensors
  std::unordered_map<const c10::TensorImpl*, size_t> group_of;
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    const auto &own = param_groups_[group].options(), &usual = defaults();
    require(typeid(own) == typeid(usual), "OSS on rank ", comm_->rank(), ": group ", group,
            " has options of another optimizer");
    for (const at::Tensor& parameter : param_groups_[group].params()) {
      const auto [known, is_new] = group_of.try_emplace(parameter.unsafeGetTensorImpl(), group);
      require(is_new || known->second == group, "OSS on rank ", comm_->rank(), ": a parameter of shape ",
              parameter.sizes(), " is in group ", known->second, " and in group ", group);
    }
  }
  check_agreement(first_group);
  auto undo =
      c10::make_scope_exit([&, ownership = ownership_, partition = *partition_, costs = owned_costs_]() mutable {
        ownership_ = std::move(ownership);
        *partition_ = std::move(partition);
        owned_costs_ = std::move(costs);
        while (local_ && local_->param_groups().size() > first_group) local_->param_groups().pop_back();
      });
  assign_owners(first_group);
  if (!local_) {
    Groups owned;
    for (const auto& group : param_groups_) owned.push_back(owned_part(group));
    local_ = make_(std::move(owned));
    state_ = std::exchange(local_->state(), {});  // Adagrad creates state in its constructor
  } else {
    const ScopeExit lent = lend_state();
    for (size_t i = first_group; i < param_groups_.size(); ++i) local_->add_param_group(owned_part(param_groups_[i]));
  }
  std::vector<at::Tensor> parameters;
  std::vector<int> owners;
  for (const PlannedParameter& added : parameters_of(std::span(param_groups_).subspan(first_group))) {
    parameters.push_back(added.tensor);
    owners.push_back(owner(added.tensor));
  }
  buckets_.push_back(std::make_unique<ParameterBuckets>(
      std::move(parameters), std::move(owners), options_.broadcast_bucket_bytes, options_.broadcast_dtype, *comm_));
  undo.release();
}

// Assigns an owner to each parameter. Balances parameters with expensive steps by cost, then other trainable parameters
// by bytes. Frozen parameters have no state, and are balanced separately.
void ShardedOptimizer::assign_owners(size_t first_group) {
  auto index = static_cast<int64_t>(partition_->owners.size());
  std::vector<at::Tensor> expensive, trainable, frozen;
  std::vector<int64_t> costs;
  for (size_t group = first_group; group < param_groups_.size(); ++group) {
    for (const at::Tensor& parameter : param_groups_[group].params()) {
      if (!ownership_.try_emplace(parameter.unsafeGetTensorImpl(), Ownership{index++, 0}).second) continue;
      const int64_t cost =
          step_cost_ && is_stepped(parameter)
              ? step_cost_(
                    {"", {}, parameter.sizes().vec(), parameter.strides().vec(), {0, parameter.numel()}, parameter},
                    param_groups_[group].options())
              : 0;
      if (cost > 0) costs.push_back(cost);
      (cost > 0 ? expensive : is_stepped(parameter) ? trainable : frozen).push_back(parameter);
    }
  }
  const Partition by_cost = partition_greedily(costs, comm_->size(), owned_costs_);
  owned_costs_ = by_cost.owned_bytes;
  partition_->owned_bytes.resize(comm_->size());
  for (size_t i = 0; i < expensive.size(); ++i) {
    ownership_.at(expensive[i].unsafeGetTensorImpl()).owner = by_cost.owners[i];
    partition_->owned_bytes[by_cost.owners[i]] += static_cast<int64_t>(expensive[i].nbytes());
  }
  auto bytes_of = [](const std::vector<at::Tensor>& parameters) {
    std::vector<int64_t> bytes;
    for (const at::Tensor& parameter : parameters) bytes.push_back(static_cast<int64_t>(parameter.nbytes()));
    return bytes;
  };
  const Partition weighed = partition_greedily(bytes_of(trainable), comm_->size(), partition_->owned_bytes);
  const Partition weightless = partition_greedily(bytes_of(frozen), comm_->size());
  for (size_t i = 0; i < trainable.size(); ++i)
    ownership_.at(trainable[i].unsafeGetTensorImpl()).owner = weighed.owners[i];
  for (size_t i = 0; i < frozen.size(); ++i)
    ownership_.at(frozen[i].unsafeGetTensorImpl()).owner = weightless.owners[i];
  partition_->owned_bytes = weighed.owned_bytes;
  for (size_t group = first_group; group < param_groups_.size(); ++group)
    for (const at::Tensor& parameter : param_groups_[group].params()) partition_->owners.push_back(owner(parameter));
}

OptimizerParamGroup ShardedOptimizer::owned_part(const OptimizerParamGroup& group) const {
  std::vector<at::Tensor> owned;
  for (const PlannedParameter& parameter : parameters_of(std::span(&group, 1)))
    if (owns(parameter.tensor)) owned.push_back(parameter.tensor);
  return {std::move(owned), group.options().clone()};
}

void ShardedOptimizer::add_param_group(const OptimizerParamGroup& group) {
  const auto call = begin_call(*calls_, *comm_, "add_param_group()");
  add_checked_group(*this, group, [this] {
    require_shardable(parameters_of(param_groups_), *comm_, "OSS");
    adopt_groups_from(param_groups_.size() - 1);
  });
}

bool ShardedOptimizer::has(const at::Tensor& parameter) const {
  return ownership_.contains(parameter.unsafeGetTensorImpl()) || is_added(parameter);
}

bool ShardedOptimizer::is_added(const at::Tensor& parameter) const {
  return std::any_of(param_groups_.begin() + static_cast<std::ptrdiff_t>(local_->param_groups().size()),
                     param_groups_.end(), [&](const OptimizerParamGroup& group) {
                       return std::ranges::any_of(group.params(),
                                                  [&](const at::Tensor& member) { return member.is_same(parameter); });
                     });
}

const std::vector<int64_t>& ShardedOptimizer::owned_bytes() const { return partition_->owned_bytes; }

int ShardedOptimizer::owner(const at::Tensor& parameter) const {
  const auto known = ownership_.find(parameter.unsafeGetTensorImpl());
  if (known != ownership_.end()) return known->second.owner;
  require<std::logic_error>(!is_added(parameter), "OSS: ", label_of(parameter),
                            " was added by add_param_group() of the base class, and has no owner before the next "
                            "step(): call OSS::add_param_group() instead");
  throw std::invalid_argument("a tensor of shape " + c10::str(parameter.sizes()) +
                              " is no parameter of this optimizer");
}

std::vector<at::Tensor> ShardedOptimizer::all_parameters() const {
  std::vector<at::Tensor> parameters;
  for (const auto& group : param_groups_)
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  return parameters;
}

std::string ShardedOptimizer::label_of(const at::Tensor& parameter) const {
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    const auto& members = param_groups_[group].params();
    const auto at = std::ranges::find_if(members, [&](const at::Tensor& member) { return member.is_same(parameter); });
    if (at != members.end())
      return "parameter " + std::to_string(at - members.begin()) + " of group " + std::to_string(group) + " on rank " +
             std::to_string(comm_->rank());
  }
  const auto known = ownership_.find(parameter.unsafeGetTensorImpl());
  return "parameter " +
         (known == ownership_.end() ? "of shape " + c10::str(parameter.sizes())
                                    : "number " + std::to_string(known->second.index)) +
         ", which is in no group now, on rank " + std::to_string(comm_->rank());
}

// ---- steps -------------------------------------------------------------------------------------

void ShardedOptimizer::copy_options(Optimizer& to) const {
  for (size_t i = 0; i < to.param_groups().size(); ++i)
    to.param_groups()[i].set_options(param_groups_[i].options().clone());
}

ScopeExit ShardedOptimizer::lend_state() {
  state_.swap(local_->state());
  return ScopeExit([this] { state_.swap(local_->state()); });
}

// Adopts groups that the user added with the base class's add_param_group(), which is not virtual. Collective if there
// are such groups. Throws std::logic_error if the user changed the parameters of other groups.
void ShardedOptimizer::take_added_groups() {
  int64_t place = 0;
  for (size_t group = 0; group < local_->param_groups().size(); ++group)
    for (size_t i = 0; i < param_groups_[group].params().size(); ++i, ++place) {
      const auto known = ownership_.find(param_groups_[group].params()[i].unsafeGetTensorImpl());
      // A smaller index is allowed: tied weights repeat.
      require<std::logic_error>(known != ownership_.end() && known->second.index <= place, "OSS on rank ",
                                comm_->rank(), ": parameter ", i, " of group ", group,
                                " is another than when the group was added: add new ones by add_param_group()");
    }
  if (param_groups_.size() > local_->param_groups().size()) adopt_groups_from(local_->param_groups().size());
  const size_t count = all_parameters().size();
  require<std::logic_error>(count == partition_->owners.size(), "OSS on rank ", comm_->rank(), ": the groups have ",
                            count, " parameters, expected ", partition_->owners.size(), ", from parameter number ",
                            place,
                            " on: add new ones by add_param_group(), and freeze those that are not to be stepped");
}

at::Tensor ShardedOptimizer::step(LossClosure closure) {
  const auto call = begin_call(*calls_, *comm_, "step()");
  if (are_swapped_in()) throw std::logic_error("OSS::step() while the averages are swapped in");
  take_added_groups();
  at::Tensor loss;
  auto take_gradients = [&] {
    if (closure) {
      at::AutoGradMode recording(true);
      loss = closure();
    }
    check_before_step(all_parameters());
    for (const auto& buckets : buckets_) buckets->require_unconverted();
    for (const auto& buckets : buckets_) buckets->reattach();
    return loss;
  };
  if (auto* lbfgs = dynamic_cast<Lbfgs*>(local_.get())) {
    loss = search(*lbfgs, closure ? LossClosure(take_gradients) : LossClosure());
  } else {
    take_gradients();
    step_owned();
    if (CapturedWork* const work = CapturedWork::recording_on(comm_->device())) add_recorded_step(*work);
  }
  if (comparison_->every() > 0 && !rounds_copies()) comparison_->count_step(parameters_of(param_groups_), *comm_);
  return loss;
}

void ShardedOptimizer::step_owned() {
  copy_options(*local_);
  if (CapturedWork* const work = CapturedWork::running_on(comm_->device()))
    if (has_recordable_step(*local_) && host_ == nullptr && comparison_->every() == 0) work->note_recordable(this);
  ChosenStep* const chosen = host_ == nullptr && comm_->size() > 1 ? chosen_step_of(*local_) : nullptr;
  if (chosen != nullptr) {
    chosen->require_steppable();
    publish([&](const std::vector<at::Tensor>& parameters) {
      const TraceSpan span(SpanKind::kOptimizer, "this rank's part of the optimizer");
      const ScopeExit lent = lend_state();
      chosen->step_parameters(parameters);
    });
    return;
  }
  {
    const TraceSpan span(SpanKind::kOptimizer, "this rank's part of the optimizer");
    const ScopeExit lent = lend_state();
    host_ ? host_->step(*local_) : static_cast<void>(local_->step());
  }
  if (comm_->size() > 1) publish();
}

// Wraps the recorded steps of the local optimizer, because they need this rank's options and states during a replay.
void ShardedOptimizer::add_recorded_step(CapturedWork& work) {
  const auto parts = std::make_shared<std::vector<RecordedStep>>(work.take_steps());
  work.add_step({[this, parts] {
                   copy_options(*local_);
                   const ScopeExit lent = lend_state();
                   std::string change;
                   for (const RecordedStep& part : *parts)
                     if (change.empty()) change = part.change();
                   return change;
                 },
                 [this, parts] {
                   const ScopeExit lent = lend_state();
                   for (const RecordedStep& part : *parts) part.prepare_replay();
                   late_reports_->look();
                 }});
}

// Publishes parameters after each move of the line search, so that all ranks compute the loss for equal parameters.
at::Tensor ShardedOptimizer::search(Lbfgs& lbfgs, const LossClosure& closure) {
  Lbfgs::Owners owners{comm_.get(), {}, [this] {
                         if (comm_->size() > 1) publish();
                       }};
  for (const at::Tensor& parameter : all_parameters())
    if (parameter.requires_grad()) owners.trained.push_back(parameter);
  copy_options(*local_);
  const ScopeExit lent = lend_state();
  return lbfgs.step_among(owners, closure);
}

// Publishes parameters, and meanwhile compares the ranks' options and collectives.
void ShardedOptimizer::publish(const ParameterBuckets::StepOwned& step_owned) {
  std::vector<std::string> options;  // compared, because the user may have changed a learning rate on one rank only
  for (const auto& group : param_groups_)
    options.push_back("group " + std::to_string(options.size()) + ": " + text_of(group.options()));
  CollectiveLog log;
  for (const std::string& of_group : options) log.add("options", of_group, -1);
  std::vector<std::vector<ParameterBuckets::PendingGather>> gathers;
  for (auto& buckets : buckets_) gathers.push_back(buckets->publish(log, step_owned));
  if (CapturedWork::recording_on(comm_->device()) != nullptr) {  // no report: CapturedStep compares the collectives
    for (size_t i = 0; i < buckets_.size(); ++i) buckets_[i]->finish(gathers[i]);
    return;
  }
  ReducedReport report(*comm_, log.fingerprint(), {}, "the end of a step");
  for (size_t i = 0; i < buckets_.size(); ++i) buckets_[i]->finish(gathers[i]);
  report.finish();
  if (comm_->device().is_cpu()) {
    if (!report.unlike_ranks()) return;
    require_agreement(*comm_, "what was published in a step", log.lines());
    report.require_alike("what was published in a step");  // reached if the log dropped the lines that differ
  }
  late_reports_->add(std::move(report),
                     [](ReducedReport& late) { late.require_alike("what was published in an earlier step"); });
  late_reports_->look();
}

bool ShardedOptimizer::keeps_averages() const { return dynamic_cast<const Averages*>(local_.get()) != nullptr; }

bool ShardedOptimizer::are_swapped_in() const {
  const auto* averages = dynamic_cast<const Averages*>(local_.get());
  return averages != nullptr && averages->are_swapped_in();
}

// Swaps in the averages on their owners and publishes them. The end of the scope swaps back and publishes again.
ScopeExit ShardedOptimizer::swap_in_averages() {
  const auto call = begin_call(*calls_, *comm_, "swap_in_averages()");
  auto* averages = dynamic_cast<Averages*>(local_.get());
  if (averages == nullptr) throw std::logic_error("OSS::swap_in_averages(): the optimizer keeps no averages");
  std::shared_ptr<ScopeExit> own;
  {
    const ScopeExit lent = lend_state();
    own = std::make_shared<ScopeExit>(averages->swap_in_averages());
  }
  if (comm_->size() > 1) publish();
  return ScopeExit([this, own] {
    {
      const ScopeExit lent = lend_state();
      own->leave();
    }
    if (comm_->size() > 1) publish();
  });
}

// Only one set of buckets contains the parameter. The other sets return the values unchanged.
at::Tensor ShardedOptimizer::as_received(const at::Tensor& parameter, const at::Tensor& values) const {
  at::Tensor received = values;
  for (const auto& buckets : buckets_) received = buckets->as_received(parameter, received);
  return received;
}

int64_t ShardedOptimizer::host_bytes() const { return host_ ? host_->host_bytes() : 0; }
int64_t ShardedOptimizer::pinned_bytes() const { return options_.offload.pin_memory ? host_bytes() : 0; }

std::vector<at::Tensor> ShardedOptimizer::owned_gradients() const {
  std::vector<at::Tensor> gradients;
  for (const auto& group : local_->param_groups())
    for (const at::Tensor& parameter : group.params())
      if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  return gradients;
}

GradNorm ShardedOptimizer::clip_grad_norm_on_device_(double max_norm, double norm_type, bool error_if_nonfinite) {
  const auto call = begin_call(*calls_, *comm_, "clip_grad_norm_()");
  take_added_groups();
  check_before_step(all_parameters());
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> all;  // this rank's gradients, including those of parameters that other ranks own
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const at::Tensor& parameter : all_parameters())
    if (seen.insert(parameter.unsafeGetTensorImpl()).second && parameter.grad().defined())
      all.push_back(parameter.grad());
  return clip_shards_by_norm(owned_gradients(), max_norm, norm_type, error_if_nonfinite, *comm_, &all);
}

// ---- state dictionaries ------------------------------------------------------------------------

OptimizerStateDict ShardedOptimizer::local_state_dict() const {
  OptimizerStateDict dict = describe_groups(*this);
  for (const auto& group : local_->param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const auto state = state_.find(parameter.unsafeGetTensorImpl());
      if (state != state_.end())
        dict.state[ownership_.at(parameter.unsafeGetTensorImpl()).index] =
            read_ordered_state(*state->second, parameter);
    }
  }
  return dict;
}

// Sends the tensors one by one, owner by owner, so that a rank holds one received tensor beside those it keeps.
void ShardedOptimizer::consolidate_state_dict(int rank) {
  require(rank >= -1 && rank < comm_->size(), "consolidate_state_dict: rank ", rank, ", expected -1 to ",
          comm_->size() - 1);
  const auto call = begin_call(*calls_, *comm_, "consolidate_state_dict()");
  take_added_groups();
  at::NoGradGuard no_grad;
  const bool keep = rank == -1 || rank == comm_->rank();
  const OptimizerStateDict own = local_state_dict();
  OptimizerStateDict whole = describe_groups(*this);
  const auto parameters = all_parameters();
  const auto texts = gather_texts(*comm_, describe_states(own.state), "the optimizer's state");
  for (int source = 0; source < comm_->size(); ++source) {
    std::istringstream text(texts[source]);
    std::string what, name;
    int64_t index = 0, value = 0;
    while (text >> what >> index >> name >> value) {
      if (what == "number") {
        whole.state[index].numbers.emplace_back(name, value);
        continue;
      }
      const auto [sizes, strides] = state_geometry(name, parameters[index]);
      at::Tensor tensor;
      if (source == comm_->rank()) {
        for (const auto& [key, mine] : own.state.at(index).tensors)
          if (key == name) tensor = in_strides(mine.to(comm_->device()), strides);  // the state may be in host memory
      } else {
        const auto dtype = static_cast<at::ScalarType>(value);
        tensor = at::empty_strided(sizes, strides, parameters[index].options().requires_grad(false).dtype(dtype));
      }
      comm_->broadcast(in_memory_order(tensor), source, "the optimizer's state").wait();
      if (keep)
        whole.state[index].tensors.emplace_back(
            name, tensor.to(at::kCPU, /*non_blocking=*/false, /*copy=*/source == comm_->rank()));
    }
  }
  consolidated_.reset();
  comm_->throw_if_aborted("consolidate_state_dict");
  if (keep) consolidated_ = std::move(whole);
}

const OptimizerStateDict& ShardedOptimizer::state_dict() const {
  require<std::logic_error>(consolidated_.has_value(), "state_dict() on rank ", comm_->rank(),
                            ": call consolidate_state_dict() on all ranks first, with this rank or -1 "
                            "(local_state_dict() has this rank's part)");
  return *consolidated_;
}

void ShardedOptimizer::load_state_dict(const OptimizerStateDict& dict) {
  const auto call = begin_call(*calls_, *comm_, "load_state_dict()");
  require_matching(dict, *this);
  const NoGradNoInferenceGuard quiet;  // states must not be inference tensors
  const auto parameters = all_parameters();
  for (const at::Tensor& parameter : parameters) owner(parameter);  // throws if the parameter has no owner
  decltype(state_) states;
  for (const auto& [index, values] : dict.state) {
    const at::Tensor& parameter = parameters[index];
    static_cast<void>(make_state(dict.kind, values));  // throws on all ranks if a name is wrong
    if (!owns(parameter)) continue;
    ParameterState own = values;
    for (auto& [name, tensor] : own.tensors)
      tensor = tensor.to(host_ ? at::Device(at::kCPU) : parameter.device(), /*non_blocking=*/false, /*copy=*/true);
    states[parameter.unsafeGetTensorImpl()] = make_state(dict.kind, own);
  }
  for (size_t i = 0; i < dict.groups.size(); ++i)  // throws before anything is changed
    write_options(*param_groups_[i].options().clone(), dict.groups[i].options);
  for (size_t i = 0; i < dict.groups.size(); ++i) write_options(param_groups_[i].options(), dict.groups[i].options);
  copy_options(*local_);
  state_ = std::move(states);
  consolidated_.reset();
}

void ShardedOptimizer::save(torch::serialize::OutputArchive& archive) const {
  const OptimizerStateDict& dict = state_dict();
  const auto whole = make_(param_groups_);
  const auto parameters = all_parameters();
  whole->state().clear();
  for (const auto& [index, values] : dict.state)
    whole->state()[parameters[index].unsafeGetTensorImpl()] = make_state(dict.kind, values);
  whole->save(archive);
}

void ShardedOptimizer::load(torch::serialize::InputArchive& archive) {
  const auto whole = make_(param_groups_);
  whole->load(archive);
  OptimizerStateDict dict = describe_groups(*whole);
  const auto parameters = all_parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto state = whole->state().find(parameters[i].unsafeGetTensorImpl());
    if (state != whole->state().end()) dict.state[static_cast<int64_t>(i)] = read_state(*state->second);
  }
  load_state_dict(dict);
}

}  // namespace tessera
