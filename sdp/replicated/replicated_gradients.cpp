#include "sdp/replicated/replicated_gradients.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/memory/memory_cache.h"
#include "core/memory/memory_kind_scope.h"
#include "core/model/memory_warning.h"
#include "core/runtime/quiet.h"

namespace tessera::internal {

// ---- plan ---------------------------------------------------------------------------------------

std::shared_ptr<ReplicatedGradients> ReplicatedGradients::make(std::shared_ptr<torch::nn::Module> module,
                                                               std::vector<PlannedParameter> parameters,
                                                               std::shared_ptr<Communicator> comm, std::string who,
                                                               OwnerOf owner_of, ReplicatedOptions options) {
  // Parameters are there already. With owners a rank gets about its share of the gradients.
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
    : mesh_{comm, comm, nullptr},
      owner_of_(std::move(owner_of)),
      options_(options),
      binding_(std::move(module), std::move(parameters), std::move(who), comm->rank()),
      taken_(binding_, owner_of_ != nullptr),
      reducer_(binding_.parameters(), mesh_, log_, options.reducer),
      copies_(binding_, options.copies_are_equal),
      states_(binding_.parameters().size()) {}

// What refers to the shared object.
void ReplicatedGradients::install() {
  const std::weak_ptr self = std::static_pointer_cast<ReplicatedGradients>(shared_from_this());
  const auto lost = while_alive(
      self, [](auto& owner, size_t parameter) { return GradientGuard::lost(owner.binding_.label(parameter)); },
      [](size_t) { return std::string("a gradient of a wrapper that no longer exists"); });
  const auto take_zeros = while_alive(
      self,
      [](auto& owner, size_t parameter) {
        const at::Tensor leaf = owner.binding_.tensor(parameter);
        leaf.mutable_grad() = at::zeros_like(leaf.detach());
      },
      [](size_t) {});
  guard_ = std::make_shared<GradientGuard>(GradientGuard::Events{lost, [](size_t) {}, take_zeros});
  binding_.set_take(while_alive(
      self, [](auto& owner, size_t parameter, const at::Tensor& gradient) { return owner.take(parameter, gradient); },
      [](size_t, const at::Tensor& gradient) { return gradient; }));
  keeper_.emplace(while_alive(self, [](auto& owner, StepEvent event) { owner.hear(event); }, [](StepEvent) {}));
  refresh_trainable();
}

void ReplicatedGradients::refresh_trainable() {
  std::lock_guard lock(mutex_);
  if (inside_backward()) throw std::logic_error("refresh_trainable inside a backward pass");
  bool changed = false;
  std::vector<size_t> order;  // backward meets the last parameters first
  for (size_t i = states_.size(); i-- > 0;) {
    const bool trainable = binding_.tensor(i).requires_grad() || states_[i].awaits_reduction;
    changed = changed || states_[i].trainable != trainable;
    if (trainable) order.push_back(i);
  }
  binding_.hook_all();
  if (!changed) return;
  plan(order);  // or throws, and what it is planned for stays as it was
  for (ParameterState& state : states_) state.trainable = false;
  for (size_t i : order) states_[i].trainable = true;
  order_agreed_ = false;
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
    std::string name = label(members);
    buckets.push_back({std::move(name), std::move(members), std::move(geometries), layout, owner, first.dtype,
                       options_.wire_dtype, options_.wire, result});
  }
  reducer_.set_buckets(std::move(buckets));
}

std::string ReplicatedGradients::label(const std::vector<size_t>& members) const {
  const auto& parameters = binding_.parameters();
  if (members.size() == 1) return "the gradient of '" + parameters[members[0]].fqn + "'";
  return "gradients of " + std::to_string(members.size()) + " parameters from '" + parameters[members.front()].fqn +
         "' to '" + parameters[members.back()].fqn + "'";
}

// ---- gradients ----------------------------------------------------------------------------------

at::Tensor ReplicatedGradients::take(size_t parameter, const at::Tensor& gradient) {
  std::lock_guard lock(mutex_);
  const at::Tensor& tensor = binding_.tensor(parameter);
  if (!tensor.requires_grad()) return gradient;
  if (passes_through()) {
    if (gradient.defined()) note_passed_through(parameter);
    return gradient;
  }
  if (c10::GradMode::is_enabled())
    throw std::logic_error("backward with create_graph=true reached " + binding_.label(parameter) +
                           ": gradients that are reduced over ranks cannot be differentiated again");
  Quiet quiet;
  if (guard_->is_in(parameter, tensor)) throw std::logic_error(GradientGuard::lost(binding_.label(parameter)));
  if (!states_[parameter].trainable)
    throw std::logic_error(binding_.label(parameter) +
                           " was frozen when forward was last called through the wrapper, and has a gradient now: "
                           "call the wrapper's forward after requires_grad_(true), not the module's");
  if (!reduces()) {
    keep_own_sum(parameter, gradient.defined());
    return gradient;  // which autograd adds to what is there
  }
  if (gradient.defined()) binding_.require_no_hook_after(parameter);
  enter();
  if (reducer_.add(parameter, gradient)) reducer_.start_full_ones();
  return {};
}

// With one rank a divisor may be set later, between a backward under no_sync() and the last one.
void ReplicatedGradients::note_passed_through(size_t parameter) {
  if (!reduces()) {
    states_[parameter].holds = Holds::kOwnSum;
    states_[parameter].divisor_of_average.reset();
    has_own_sums_ = true;
    return;
  }
  if (std::exchange(has_own_sums_, false))
    for (ParameterState& state : states_)
      if (state.holds == Holds::kOwnSum) state.holds = Holds::kAverage;
  states_[parameter].holds = Holds::kAverage;
}

// An average that is on one rank only counts in an average to come as often as that divides by; one that is on
// every rank once, unless it is divided by something else.
void ReplicatedGradients::keep_own_sum(size_t parameter, bool adds) {
  const at::Tensor& tensor = binding_.tensor(parameter);
  ParameterState& state = states_[parameter];
  if (state.holds != Holds::kOwnSum || !tensor.grad().defined()) state.divisor_of_average.reset();
  if (tensor.grad().defined() && state.holds == Holds::kAverage) {
    const double ranks = mesh_.world->size();
    const double divisor = reducer_.divisor().value_or(ranks);
    const double factor = divisor / (owner_of_ ? 1 : ranks);
    state.divisor_of_average = divisor;
    state.has_average = reducer_.divisor() ? tensor.grad().detach().any() : at::Tensor();  // cleared to zeros, maybe
    if (factor != 1) tensor.mutable_grad() = tensor.grad() * factor;
  }
  if (!adds) return;
  state.holds = Holds::kOwnSum;
  if (mesh_.world->size() > 1) copies_.note_once(CopyWatch::Since::kOwnSums);
}

// ---- passes -------------------------------------------------------------------------------------

void ReplicatedGradients::begin_forward() {
  std::lock_guard lock(mutex_);
  if (inside_backward()) return;  // a checkpointed part is computed again
  const bool trains = c10::GradMode::is_enabled();
  Quiet quiet;
  recover();
  binding_.require_nothing_new();
  if (trains && !passes_through()) taken_.require_alone();
  for (size_t i = 0; i < states_.size(); ++i) {
    binding_.require_same_kind(i);
    keeper_->keep(binding_.tensor(i));
  }
  if (trains) copies_.require_alike(*mesh_.world);
  note_failed_forward();
  is_forward_open_ = trains && reduces();
  if (options_.must_use_all && any_backward_) require_all_used();
  any_backward_ = false;
  refresh_trainable();
  if (mesh_.world->size() > 1) binding_.note_versions();
}

void ReplicatedGradients::require_all_used() {
  for (size_t i = 0; i < states_.size(); ++i)
    if (states_[i].trainable && !std::exchange(states_[i].used, false) && binding_.tensor(i).requires_grad())
      throw std::runtime_error(
          binding_.label(i) +
          " had no gradient on any rank in the last iteration, which "
          "DdpOptions::find_unused_parameters = true would allow: gradients of such a parameter stay "
          "as they were");
}

// The callback at the end must belong to the outermost pass: one that starts within it, to compute a checkpointed part
// again, must not end it.
void ReplicatedGradients::end_forward(const std::vector<at::Tensor>& outputs) {
  if (mesh_.world->size() > 1) binding_.require_same_versions("forward");
  if (!inside_backward()) is_forward_open_ = false;
  if (passes_through() || inside_backward() || !c10::GradMode::is_enabled()) return;
  refresh_trainable();  // once more: forward may have frozen or replaced parameters itself
  for (size_t i = 0; i < states_.size(); ++i)
    states_[i].awaits_reduction = states_[i].awaits_reduction || binding_.tensor(i).requires_grad();
  if (!reduces()) return;
  log_.add_forward();
  if (states_.empty()) return;
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
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

// Of a forward that threw, nobody says so.
void ReplicatedGradients::note_failed_forward() {
  if (std::exchange(is_forward_open_, false)) log_.add_failed_forward();
}

// What one rank does not do alone: the ranks compare it with what they have exchanged. With owners each rank has other
// gradients.
void ReplicatedGradients::note_what_came_before() {
  if (!seen_.empty()) {
    const ValueSamples now = ValueSamples::of(binding_.parameters());
    if (now.is_on_device())
      log_.set_alike(now.any_differs_from(seen_));  // whether there was a step
    else if (now != seen_)
      log_.add("a step");
  }
  if (owner_of_) return;
  for (size_t i = 0; i < states_.size(); ++i) {
    const bool has_average = states_[i].holds == Holds::kAverage || states_[i].divisor_of_average;
    log_.add_kept(has_average && binding_.tensor(i).grad().defined(), /*is_empty=*/false);
  }
}

// Whether the caller of the pass that begins may get a parameter's gradient of this rank's rows:
// torch::autograd::grad() gives what it was asked for, and keeps it from the parameter. Inputs alone are none.
bool ReplicatedGradients::hands_out_gradients() const {
  const auto* asked_for = torch::autograd::get_current_graph_task_exec_info();
  if (asked_for == nullptr || asked_for->empty()) return true;  // backward(), maybe within such a pass
  for (const PlannedParameter& parameter : binding_.parameters()) {
    const auto node = torch::autograd::impl::try_get_grad_accumulator(parameter.tensor);
    const auto found = asked_for->find(node.get());
    if (found != asked_for->end() && found->second.captures_ != nullptr) return true;
  }
  return false;
}

void ReplicatedGradients::begin() {
  hands_out_gradients_ = hands_out_gradients();
  note_failed_forward();
  note_what_came_before();
  std::vector<size_t> order(reducer_.buckets().size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  reducer_.begin(order, /*frozen_too=*/true);  // of which sums may be here from before
  for (size_t i = 0; i < states_.size(); ++i) {
    if (states_[i].holds == Holds::kOwnSum && !states_[i].trainable) continue;  // frozen since: a step is refused
    if (std::exchange(states_[i].holds, Holds::kNothing) != Holds::kOwnSum) continue;
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
    if (binding_.tensor(i).grad().defined()) states_[i].holds = Holds::kAverage;
  }
  any_backward_ = any_backward_ || any_used;  // torch::autograd::grad() for inputs is none that has to use all
  if (mesh_.world->size() > 1) {
    if (any_used)
      owner_of_ ? copies_.note(CopyWatch::Since::kOwnersAverage) : copies_.forget();
    else if (hands_out_gradients_)
      copies_.note(CopyWatch::Since::kNoGradient);
  }
  if (options_.copies_are_equal && mesh_.world->size() > 1) seen_ = ValueSamples::of(binding_.parameters());
  if (!order_agreed_ && any_used) agree_on_order();
  if (std::exchange(first_backward_, false) && mesh_.world->device().is_cpu()) release_freed_memory();
}

void ReplicatedGradients::fail() {
  for (size_t i = 0; i < states_.size(); ++i)
    if (states_[i].trainable) guard_->put(i, binding_.label(i), binding_.tensor(i));
}

void ReplicatedGradients::abandon() {
  reducer_.abandon();
  if (failed_reducing()) log_.add("a failed backward");  // on one rank alone, it would be a step behind from then on
  for (ParameterState& state : states_) state.holds = Holds::kNothing;
}

// From now on buckets are made for the order in which rank 0 saw the gradients come.
void ReplicatedGradients::agree_on_order() {
  std::vector<size_t> order = reducer_.arrivals();
  std::vector<bool> came(states_.size(), false);
  for (size_t parameter : order) came[parameter] = true;
  for (const GradientBucket& bucket : reducer_.buckets())
    for (size_t parameter : bucket.members)
      if (!came[parameter]) order.push_back(parameter);
  at::Tensor numbers = at::empty({static_cast<int64_t>(order.size())}, at::TensorOptions(at::kCPU).dtype(at::kLong));
  std::copy(order.begin(), order.end(), numbers.mutable_data_ptr<int64_t>());
  numbers = numbers.to(mesh_.world->device());
  mesh_.world->broadcast(numbers, 0, "the order of gradients").wait();
  numbers = mesh_.world->to_host(numbers, "the order of gradients");
  std::copy_n(numbers.const_data_ptr<int64_t>(), order.size(), order.begin());
  plan(order);
  order_agreed_ = true;
}

// ---- what wrappers ask for ----------------------------------------------------------------------

void ReplicatedGradients::set_divisor(double divisor) {
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < states_.size(); ++i) {
    const ParameterState& state = states_[i];
    if (state.holds != Holds::kOwnSum || !state.divisor_of_average || *state.divisor_of_average == divisor ||
        !binding_.tensor(i).grad().defined() || (state.has_average.defined() && !state.has_average.item<bool>()))
      continue;
    throw std::logic_error("what gradients are divided by would become " + std::to_string(divisor) + ", but was " +
                           std::to_string(*state.divisor_of_average) + " when backward under no_sync() added to the " +
                           "average that is the gradient of " + binding_.label(i) +
                           ": set it before that backward, or clear the gradients");
  }
  reducer_.set_divisor(divisor);
}

void ReplicatedGradients::hear(StepEvent event) {
  switch (event) {
    case StepEvent::kWantsNorm:
      return require_averages_to_clip();
    case StepEvent::kBegins:
      require_averages();
      copies_.step_begins();
      seen_ = {};  // such an optimizer compares steps itself, and owners may have other bits than copies
      return;
    case StepEvent::kEnds:  // on a device each forward would have to ask
      if (mesh_.world->device().is_cpu()) copies_.step_ends();
  }
}

void ReplicatedGradients::require_averages() const {
  std::lock_guard lock(mutex_);
  if (passes_through()) return;
  const std::string rank = std::to_string(mesh_.world->rank());
  if (is_running()) throw std::logic_error("a step on rank " + rank + " inside a backward pass");
  for (size_t i = 0; i < states_.size(); ++i) {
    const at::Tensor& tensor = binding_.tensor(i);
    if (guard_->is_in(i, tensor))
      throw std::logic_error("a step on rank " + rank +
                             " after a backward pass that failed: " + GradientGuard::lost(binding_.label(i)));
    if (states_[i].holds == Holds::kOwnSum && tensor.grad().defined())
      throw std::logic_error("a step on rank " + rank + " while the gradient of " + binding_.label(i) +
                             " is this rank's own sum, made under no_sync(): run the last backward before a step "
                             "outside it");
  }
  copies_.require_no_gradient_by_hand();
}

void ReplicatedGradients::require_averages_to_clip() {
  require_averages();
  std::lock_guard lock(mutex_);
  copies_.gradients_are_scaled();
}

void ReplicatedGradients::report(MemoryReport& report) const {
  std::lock_guard lock(mutex_);
  reducer_.report(report);
  for (const GradientBucket& bucket : reducer_.buckets())
    if (bucket.result != nullptr) report.grad_bytes += bucket.result->idle_bytes();
}

void ReplicatedGradients::reset_peak() {
  std::lock_guard lock(mutex_);
  reducer_.reset_peak();
}

}  // namespace tessera::internal
