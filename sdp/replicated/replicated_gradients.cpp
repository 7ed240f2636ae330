#include "sdp/replicated/replicated_gradients.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/memory/memory_cache.h"
#include "core/memory/memory_kind_scope.h"
#include "core/model/memory_warning.h"
#include "core/runtime/graph_recorder.h"
#include "core/runtime/no_grad_no_inference_guard.h"

namespace tessera::internal {
namespace {

std::string label_of(const std::vector<PlannedParameter>& parameters, const std::vector<size_t>& members) {
  if (members.size() == 1) return "the gradient of '" + parameters[members[0]].fqn + "'";
  return "gradients of " + std::to_string(members.size()) + " parameters from '" + parameters[members.front()].fqn +
         "' to '" + parameters[members.back()].fqn + "'";
}

}  // namespace

// ---- plan ---------------------------------------------------------------------------------------

std::shared_ptr<ReplicatedGradients> ReplicatedGradients::make(std::shared_ptr<torch::nn::Module> module,
                                                               std::vector<PlannedParameter> parameters,
                                                               std::shared_ptr<Communicator> comm, std::string who,
                                                               OwnerOf owner_of, ReplicatedOptions options) {
  // The parameters are already allocated. With owners, each rank allocates about 1/N of the gradients.
  MemoryNeed need;
  for (const PlannedParameter& parameter : parameters) {
    const auto bytes = static_cast<int64_t>(parameter.tensor.nbytes());
    need.present_bytes += bytes;
    if (parameter.tensor.requires_grad()) need.gradient_bytes += bytes;
  }
  if (owner_of) need.gradient_bytes /= comm->size();
  warn_if_short_of_memory(who, need, *comm);
  std::shared_ptr<ReplicatedGradients> made(new ReplicatedGradients(
      std::move(module), std::move(parameters), std::move(comm), std::move(who), std::move(owner_of), options));
  made->install();
  return made;
}

ReplicatedGradients::ReplicatedGradients(std::shared_ptr<torch::nn::Module> module,
                                         std::vector<PlannedParameter> parameters, std::shared_ptr<Communicator> comm,
                                         std::string who, OwnerOf owner_of, ReplicatedOptions options)
    : BackwardPass(comm->device(), *module),
      mesh_{comm, comm, nullptr},
      owner_of_(std::move(owner_of)),
      options_(options),
      binding_(std::move(module), std::move(parameters), std::move(who), comm->rank()),
      reducer_(binding_.parameters(), mesh_, log_, options.reducer),
      states_(binding_.parameters().size()),
      comparison_(options.compare_replicas_every) {}

// Afterwards the hooks pass gradients through, so the module can be trained without the wrapper. If this thread runs a
// backward that has not begun a due reduction, that backward throws.
ReplicatedGradients::~ReplicatedGradients() {
  const bool awaits_reduction =
      std::ranges::any_of(states_, [](const ParameterState& state) { return state.awaits_reduction; });
  if (awaits_reduction && !is_running() && reduces() && !passes_through()) fail_backward();
}

// Sets up the callbacks, which hold weak pointers to this object, and the buckets.
void ReplicatedGradients::install() {
  const std::weak_ptr self = std::static_pointer_cast<ReplicatedGradients>(shared_from_this());
  const auto lost = while_alive(
      self, [](auto& owner, size_t parameter) { return GradPlaceholder::lost(owner.binding_.label(parameter)); },
      [](size_t) { return std::string("a gradient of a wrapper that no longer exists"); });
  const auto take_zeros = while_alive(
      self,
      [](auto& owner, size_t parameter) {
        const at::Tensor leaf = owner.binding_.tensor(parameter);
        leaf.mutable_grad() = at::zeros_like(leaf.detach());
      },
      [](size_t) {});
  placeholder_ = std::make_shared<GradPlaceholder>(GradPlaceholder::Events{lost, [](size_t) {}, take_zeros});
  binding_.set_take(while_alive(
      self, [](auto& owner, size_t parameter, const at::Tensor& gradient) { return owner.take(parameter, gradient); },
      [](size_t, const at::Tensor& gradient) { return gradient; }));
  step_check_.emplace(while_alive(self, [](auto& owner) { owner.require_averages(); }, [] {}));
  // Makes gradients dense, as backward does, because an optimizer's state may take the layout of its first gradient.
  for (size_t i = 0; i < states_.size(); ++i)
    if (at::Tensor& grad = binding_.tensor(i).mutable_grad(); grad.defined() && grad.is_sparse())
      grad = grad.to_dense();
  refresh_trainable();
}

void ReplicatedGradients::refresh_trainable() {
  std::lock_guard lock(mutex_);
  plan_trainable();
}

void ReplicatedGradients::plan_trainable() {
  require_outside_backward("refresh_trainable");
  bool changed = false;
  std::vector<size_t> order;  // backward reaches the last parameters first
  for (size_t i = states_.size(); i-- > 0;) {
    const bool trainable = binding_.tensor(i).requires_grad() || states_[i].awaits_reduction;
    changed = changed || states_[i].trainable != trainable;
    if (trainable) order.push_back(i);
  }
  binding_.hook_all();
  if (!changed) return;
  plan(order);  // on an exception, the states stay unchanged
  for (ParameterState& state : states_) state.trainable = false;
  for (size_t i : order) states_[i].trainable = true;
  flags_.order_agreed = false;
}

void ReplicatedGradients::plan(const std::vector<size_t>& order) {
  const auto& parameters = binding_.parameters();
  const int rank = mesh_.world->rank(), world = mesh_.world->size();
  std::vector<BucketItem> items(parameters.size());
  for (size_t i : order)
    items[i] = {parameters[i].tensor.numel(), parameters[i].tensor.scalar_type(),
                owner_of_ ? owner_of_(parameters[i]) : 0};
  std::vector<GradientBucket> buckets;
  results_.clear();
  for (auto& members : plan_buckets(items, order, options_.limits)) {
    const BucketItem& first = items[members[0]];
    const auto owner = static_cast<int>(first.key);
    std::vector<int64_t> numels;
    std::vector<ParameterGeometry> geometries;
    for (size_t member : members) {
      numels.push_back(items[member].numel);
      geometries.push_back(geometry_of(parameters[member].tensor));
    }
    const int64_t alignment = FlatLayout::alignment_numel(static_cast<int64_t>(c10::elementSize(first.dtype)));
    const FlatLayout layout =
        owner_of_ ? FlatLayout::by_owner(numels, std::vector<int>(numels.size(), owner), world, alignment)
                  : FlatLayout::whole(numels, world, alignment);
    GradientBuffer* result = nullptr;
    if (!owner_of_ || owner == rank) {
      std::vector<GradientBuffer::Member> leaves;
      for (size_t i = 0; i < members.size(); ++i)
        leaves.push_back({parameters[members[i]].tensor, geometries[i], layout.offset(static_cast<int64_t>(i)),
                          owner_of_ && world > 1 ? binding_.label(members[i]) : ""});
      auto memory = [device = mesh_.world->device()](int64_t numel, at::ScalarType dtype) {
        const MemoryKindScope kind(MemoryKind::kGradients);
        return at::empty({numel}, at::TensorOptions().dtype(dtype).device(device));
      };
      results_.push_back(std::make_unique<GradientBuffer>(std::move(leaves), layout.full_numel(), first.dtype, memory,
                                                          options_.gradients_are_views));
      result = results_.back().get();
    }
    std::string name = label_of(parameters, members);
    buckets.push_back({std::move(name), std::move(members), std::move(geometries), layout, owner, first.dtype,
                       options_.wire_dtype, options_.wire, result});
  }
  reducer_.set_buckets(std::move(buckets));
}

// ---- gradients ----------------------------------------------------------------------------------

at::Tensor ReplicatedGradients::take(size_t parameter, const at::Tensor& gradient) {
  // Makes gradients dense at every world size, also under no_sync(), whose sums are reduced later.
  if (gradient.defined() && gradient.is_sparse()) return take(parameter, gradient.to_dense());
  std::lock_guard lock(mutex_);
  const at::Tensor& tensor = binding_.tensor(parameter);
  if (!tensor.requires_grad()) return gradient;
  CapturedWork::require_own(tensor, [&] { return binding_.label(parameter); });
  if (passes_through()) {
    if (gradient.defined()) note_passed_through(parameter);
    return gradient;
  }
  if (c10::GradMode::is_enabled())
    throw std::logic_error("backward with create_graph=true reached " + binding_.label(parameter) +
                           ": gradients that are reduced over ranks cannot be differentiated again");
  NoGradNoInferenceGuard quiet;
  if (is_lost(parameter)) throw std::logic_error(GradPlaceholder::lost(binding_.label(parameter)));
  if (!states_[parameter].trainable)
    throw std::logic_error(binding_.label(parameter) +
                           " was frozen when forward was last called through the wrapper, and has a gradient now: "
                           "call the wrapper's forward after requires_grad_(true), not the module's");
  if (!reduces()) {
    if (gradient.defined()) begin_own_sum(parameter);
    return gradient;  // autograd adds it to `.grad`
  }
  if (gradient.defined()) binding_.require_no_hook_after(parameter);
  // With owners, a gradient of another wrapper's forward would go to a rank whose optimizer may not step it.
  if (owner_of_ && step_check_->is_replaced(tensor))
    throw std::logic_error(binding_.label(parameter) +
                           " has a gradient of a forward through another wrapper: train it through one wrapper");
  enter();
  if (reducer_.add(parameter, gradient)) reducer_.start_full_ones();
  return {};
}

// Called in a group of one rank without a divisor, where autograd accumulates gradients. Under no_sync(), marks the
// gradient as kAccumulating; otherwise marks all as kOrdinary. A reduction, if a divisor is set later, reads the marks.
void ReplicatedGradients::note_passed_through(size_t parameter) {
  if (!reduces()) {
    states_[parameter].grad = GradState::kAccumulating;
    flags_.has_own_sums = true;
    return;
  }
  if (!std::exchange(flags_.has_own_sums, false)) return;
  for (ParameterState& state : states_)
    if (state.grad == GradState::kAccumulating) state.grad = GradState::kOrdinary;
}

// Begins this rank's own sum. An existing gradient is an average: from a backward, from before wrapping, or from the
// user. The next reduction adds the averages of all ranks (under SDP only the owner's) and divides the sum by the
// divisor. Scales the average now, so that the reduction restores it.
void ReplicatedGradients::begin_own_sum(size_t parameter) {
  at::Tensor& grad = binding_.tensor(parameter).mutable_grad();
  ParameterState& state = states_[parameter];
  const bool goes_on = state.grad == GradState::kAccumulating;
  if (!grad.defined() || !goes_on) state.has_average = false;
  state.grad = GradState::kAccumulating;
  if (!grad.defined() || goes_on) return;
  if (!gets_average(parameter)) return grad.reset();
  state.has_average = true;
  const double ranks = mesh_.world->size();
  const double factor = reducer_.divisor().value_or(ranks) / (owner_of_ ? 1 : ranks);
  if (factor != 1) grad = grad * factor;
}

// Another rank may have begun its own sum of a parameter that this rank did not use under no_sync(). The reduction then
// adds the averages of all ranks, so this rank must also contribute its average.
void ReplicatedGradients::begin_own_sums_of_unused() {
  if (!std::exchange(flags_.has_own_sums, false) || owner_of_) return;
  for (size_t i = 0; i < states_.size(); ++i)
    if (states_[i].trainable && states_[i].grad == GradState::kOrdinary && binding_.tensor(i).grad().defined())
      begin_own_sum(i);
}

// ---- passes -------------------------------------------------------------------------------------

bool ReplicatedGradients::begin_forward() {
  std::lock_guard lock(mutex_);
  if (inside_backward()) return false;  // backward recomputes a part of the model
  const bool trains = c10::GradMode::is_enabled();
  if (trains && !reduces() && !passes_through()) flags_.has_own_sums = true;
  NoGradNoInferenceGuard quiet;
  recover();
  binding_.require_nothing_new();
  for (size_t i = 0; i < states_.size(); ++i) {
    binding_.require_same_kind(i);
    if (trains || !step_check_->is_replaced(binding_.tensor(i))) step_check_->attach(binding_.tensor(i));
  }
  if (trains && reduces() && options_.copies_are_equal) comparison_.count_step(binding_.parameters(), *mesh_.world);
  note_failed_forward();
  flags_.is_forward_open = trains && reduces();
  if (std::exchange(flags_.any_backward, false) && options_.must_use_all) require_all_used();
  plan_trainable();
  if (mesh_.world->size() > 1) binding_.note_versions();
  return std::exchange(flags_.last_forward_trained, trains && reduces());
}

void ReplicatedGradients::require_all_used() {
  std::optional<std::string> unused;  // the first one
  for (size_t i = 0; i < states_.size(); ++i)
    if (states_[i].trainable && !std::exchange(states_[i].used, false) && binding_.tensor(i).requires_grad() && !unused)
      unused = binding_.label(i);
  if (unused)
    throw std::runtime_error(*unused +
                             " had no gradient on any rank in the last iteration, which "
                             "DdpOptions::find_unused_parameters = true would allow: gradients of such a parameter "
                             "stay as they were");
}

// Hooks the outputs, so that the outermost backward begins the pass, not a nested backward that recomputes a part.
void ReplicatedGradients::end_forward(const std::vector<at::Tensor>& outputs) {
  if (mesh_.world->size() > 1) binding_.require_same_versions("forward");
  if (!inside_backward()) flags_.is_forward_open = false;
  if (passes_through() || inside_backward() || !c10::GradMode::is_enabled()) return;
  refresh_trainable();  // a second time, because forward may have frozen or replaced parameters
  for (size_t i = 0; i < states_.size(); ++i)
    states_[i].awaits_reduction = states_[i].awaits_reduction || binding_.tensor(i).requires_grad();
  if (!reduces()) return;
  log_.add_forward();
  if (states_.empty()) return;
  for (const at::Tensor& output : outputs) {
    // Skips a parameter that forward returns: a leaf would keep the hook, and take() begins the pass for its gradient.
    if (!output.requires_grad() || output.is_leaf()) continue;
    output.register_hook([weak = weak_from_this(), label = binding_.label(0)](const at::Tensor&) {
      const auto self = std::static_pointer_cast<ReplicatedGradients>(weak.lock());
      if (!self)
        throw std::logic_error(label +
                               " would get a gradient of a forward through a wrapper that no longer exists, and nobody "
                               "would average it over the ranks: keep the wrapper until backward is over");
      std::lock_guard lock(self->mutex_);
      if (self->reduces()) self->enter();
    });
  }
}

// Logs a failed forward: one that threw before end_forward(). Called by the next forward or backward.
void ReplicatedGradients::note_failed_forward() {
  if (std::exchange(flags_.is_forward_open, false)) log_.add_failed_forward();
}

// Logs, for each parameter, whether it holds an average. All ranks must clear the same gradients, and compare their
// logs at the end of the pass. A no-op with owners, because each rank then holds gradients of different parameters.
void ReplicatedGradients::note_what_came_before() {
  if (owner_of_) return;
  for (size_t i = 0; i < states_.size(); ++i) {
    const bool is_average = states_[i].grad != GradState::kAccumulating || states_[i].has_average;
    log_.add_kept(is_average && !is_lost(i) && binding_.tensor(i).grad().defined(), /*is_empty=*/false);
  }
}

void ReplicatedGradients::begin() {
  note_failed_forward();
  note_what_came_before();
  std::vector<size_t> order(reducer_.buckets().size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  reducer_.begin(order, /*frozen_too=*/true);  // some ranks may hold sums of frozen parameters
  begin_own_sums_of_unused();
  for (size_t i = 0; i < states_.size(); ++i) {
    // Keeps the state of a lost gradient, and of a frozen parameter's sum. A step then throws.
    if (is_lost(i) || (states_[i].grad == GradState::kAccumulating && !states_[i].trainable)) continue;
    if (std::exchange(states_[i].grad, GradState::kOrdinary) != GradState::kAccumulating) continue;
    const at::Tensor sum = std::exchange(binding_.tensor(i).mutable_grad(), at::Tensor());
    if (sum.defined()) reducer_.add_kept(i, sum);
  }
}

void ReplicatedGradients::end() {
  reducer_.finish();
  bool any_used = false;
  for (size_t i = 0; i < states_.size(); ++i) {
    states_[i].awaits_reduction = false;
    if (!reducer_.was_used(i)) continue;
    any_used = states_[i].used = true;
    if (!gets_average(i)) binding_.tensor(i).mutable_grad().reset();  // only the owner keeps the average
    states_[i].grad = GradState::kOrdinary;
  }
  // torch::autograd::grad() of inputs uses no parameter. Parameters without gradients are then not an error.
  flags_.any_backward = flags_.any_backward || any_used;
  if (!flags_.order_agreed && any_used && !CapturedWork::recording_on(mesh_.world->device())) agree_on_order();
  if (std::exchange(flags_.first_backward, false) && mesh_.world->device().is_cpu()) release_freed_memory();
}

void ReplicatedGradients::fail() {
  for (size_t i = 0; i < states_.size(); ++i) {
    if (!states_[i].trainable) continue;
    states_[i].grad = GradState::kLost;
    placeholder_->put(i, binding_.label(i), binding_.tensor(i));
  }
}

// Whether a failed backward lost the gradient. False after zero_grad(), which removes the placeholder.
bool ReplicatedGradients::is_lost(size_t parameter) const {
  return states_[parameter].grad == GradState::kLost && placeholder_->is_in(parameter, binding_.tensor(parameter));
}

void ReplicatedGradients::abandon(bool reduced) {
  reducer_.abandon();
  if (reduced) log_.add("a failed backward");  // so that ranks detect that only some of them failed
  for (size_t i = 0; i < states_.size(); ++i)
    if (!is_lost(i)) states_[i].grad = GradState::kOrdinary;
}

// Replans buckets in the order in which gradients arrived on rank 0. Collective.
void ReplicatedGradients::agree_on_order() {
  std::vector<size_t> order = reducer_.arrivals();
  std::vector<bool> came(states_.size(), false);
  for (size_t parameter : order) came[parameter] = true;
  for (const GradientBucket& bucket : reducer_.buckets())
    for (size_t parameter : bucket.members)
      if (!came[parameter]) order.push_back(parameter);
  at::Tensor numbers = at::empty({static_cast<int64_t>(order.size())}, at::TensorOptions(at::kCPU).dtype(at::kLong));
  std::ranges::copy(order, numbers.mutable_data_ptr<int64_t>());
  numbers = numbers.to(mesh_.world->device());
  mesh_.world->broadcast(numbers, 0, "the order of gradients").wait();
  numbers = mesh_.world->to_host(numbers, "the order of gradients");
  std::copy_n(numbers.const_data_ptr<int64_t>(), order.size(), order.begin());
  plan(order);
  flags_.order_agreed = true;
}

// ---- calls by the wrappers ------------------------------------------------------------------------

void ReplicatedGradients::set_divisor(double divisor) {
  std::lock_guard lock(mutex_);
  reducer_.set_divisor(divisor);
}

std::optional<double> ReplicatedGradients::divisor() const {
  std::lock_guard lock(mutex_);
  return reducer_.divisor();
}

void ReplicatedGradients::require_capturable() const {
  BackwardPass::require_capturable(
      {{comparison_.every() > 0, "compare_replicas_every, or TESSERA_DEBUG=replicas"}, {!reduces(), "no_sync"}});
}

void ReplicatedGradients::prepare_capture() {
  std::lock_guard lock(mutex_);
  require_capturable();
  NoGradNoInferenceGuard quiet;
  recover();
  binding_.move_hooks_to_current_stream();
  flags_.last_forward_trained |= !flags_.first_backward;
}

void ReplicatedGradients::prepare_replay() {
  std::lock_guard lock(mutex_);
  require_capturable();
  NoGradNoInferenceGuard quiet;
  recover();
  binding_.require_nothing_new();
  for (size_t i = 0; i < states_.size(); ++i) binding_.require_same_kind(i);
  flags_.last_forward_trained |= !flags_.first_backward;
}

void ReplicatedGradients::require_averages() const {
  const UserCall call(*this, "a step or clip_grad_norm_()");
  std::lock_guard lock(mutex_);
  if (passes_through()) return;
  const std::string rank = std::to_string(mesh_.world->rank());
  if (is_running()) throw std::logic_error("a step on rank " + rank + " inside a backward pass");
  for (size_t i = 0; i < states_.size(); ++i) {
    const at::Tensor& tensor = binding_.tensor(i);
    if (is_lost(i))
      throw std::logic_error("a step on rank " + rank +
                             " after a backward pass that failed: " + GradPlaceholder::lost(binding_.label(i)));
    if (states_[i].grad == GradState::kAccumulating && tensor.grad().defined())
      throw std::logic_error("a step on rank " + rank + " while the gradient of " + binding_.label(i) +
                             " is this rank's own sum, made under no_sync(): run the last backward before a step "
                             "outside it");
  }
}

void ReplicatedGradients::report(MemoryReport& report) const {
  std::lock_guard lock(mutex_);
  reducer_.report(report);
}

void ReplicatedGradients::reset_peak() {
  std::lock_guard lock(mutex_);
  reducer_.reset_peak();
}

}  // namespace tessera::internal
