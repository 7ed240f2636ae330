#include "fsdp/sharded_gradients.h"

#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string_view>
#include <typeinfo>
#include <utility>

namespace tessera::internal {
namespace {

ReducerOptions reducer_options(ShardedModel& model) {
  ReducerOptions options;
  options.refuse_uneven_use = model.options().refuse_uneven_use;
  options.check_finite = model.options().check_finite;
  options.awaited_in_flight = 0;  // each holds a whole unit, and room for what the peers send
  if (model.options().offload.grads) {
    options.to_host = model.offload().copies();
    options.staging = &model.offload().staging();
  }
  return options;
}

bool has_hooks(const at::Tensor& leaf) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(leaf);
  return meta != nullptr && (!meta->hooks_.empty() || meta->post_acc_grad_hooks_ != nullptr);
}

// By its type: of a torch::autograd::Function, or of a class outside of libtorch.
bool is_users(const torch::autograd::Node& node) {
  const std::string_view type = typeid(node).name();
  return !type.starts_with("N5torch8autograd") || type.starts_with("N5torch8autograd7CppNodeI");
}

// Must not throw, where a guard's end is told: only what can be counted, so no other guard.
bool are_zeros(const at::Tensor& gradient) {
  return gradient.defined() && !is_paged(gradient) && gradient.layout() == at::kStrided && !gradient.is_meta() &&
         gradient.count_nonzero().item<int64_t>() == 0;
}

}  // namespace

ShardedGradients::ShardedGradients(ShardedModel& model, std::recursive_mutex& mutex)
    : model_(model),
      mutex_(mutex),
      binding_(model.module(), model.parameters(), "FullyShardedDataParallel", model.mesh().world->rank()),
      reducer_(binding_.parameters(), model.mesh(), model.log(), reducer_options(model)),
      is_expected_(model.units().size(), false),
      versions_(model.units().size()),
      shown_versions_(model.units().size()),
      incomplete_(model.units().size(), 0) {
  make_buckets();
  make_guards();
  place_guards();
}

void ShardedGradients::make_buckets() {
  std::vector<GradientBucket> buckets;
  for (auto& unit : model_.units()) {
    buckets_of_.push_back(buckets.size());
    for (auto& paged : unit->flat_parameters()) {
      FlatParameter& flat = paged->flat;
      paged->first_parameter = states_.size();
      const bool is_exempt = flat.parameters()[0].full_precision;
      const WireFormat wire = is_exempt ? WireFormat::kDtype : model_.options().wire.gradients;
      GradientBucket bucket{flat.name(), {},   flat.geometries(), flat.layout(), 0, flat.reduce_dtype(),
                            {},          wire, &flat.gradient()};
      for (const at::Tensor& shard : flat.parameter_shards()) {
        bucket.members.push_back(states_.size());
        states_.push_back({unit.get(), shard, shard.requires_grad()});
        trained_.push_back(shard.requires_grad());
        has_gradient_.push_back(false);
      }
      buckets.push_back(std::move(bucket));
    }
  }
  for (const auto& unit : model_.units()) shown_versions_[unit->index()] = unit->version();
  buckets_of_.push_back(buckets.size());
  bucket_done_.assign(buckets.size(), false);
  reducer_.set_buckets(std::move(buckets));
}

void ShardedGradients::make_guards() {
  elsewhere_ = std::make_shared<GradientGuard>(GradientGuard::Events{
      [this](size_t parameter) {
        return "the gradient of " + binding_.label(parameter) +
               " is in the wrapper's shards: build optimizers from fsdp.parameters(), after wrapping, and clip with "
               "fsdp.clip_grad_norm_()";
      },
      [this](size_t parameter) {  // module->zero_grad(), or the zero_grad() of an optimizer built before wrapping
        std::lock_guard lock(mutex_);
        clear(parameter);
        states_[parameter].is_cleared = true;
        // What has been put in the guard's place is there already.
        if (take_zeros_by_hand(parameter) || !has_gradient_by_hand(parameter)) return;
        states_[parameter].is_by_hand = true;
        not_ready_->put(parameter, binding_.label(parameter), states_[parameter].shard);
      },
      [this](size_t parameter) {
        std::lock_guard lock(mutex_);
        at::Tensor& grad = states_[parameter].shard.mutable_grad();
        if (grad.defined()) grad.zero_();
      }});
  not_ready_ =
      std::make_shared<GradientGuard>(GradientGuard::Events{[this](size_t parameter) { return reason(parameter); },
                                                            [this](size_t parameter) {
                                                              std::lock_guard lock(mutex_);
                                                              forget(parameter);
                                                            },
                                                            [this](size_t parameter) {
                                                              std::lock_guard lock(mutex_);
                                                              clear(parameter);
                                                              states_[parameter].shard.mutable_grad() =
                                                                  at::zeros_like(states_[parameter].shard.detach());
                                                            }});
}

// Guards that outlive it tell nobody.
ShardedGradients::~ShardedGradients() {
  for (size_t i = 0; i < states_.size(); ++i) {
    elsewhere_->take_out(i, binding_.tensor(i));
    not_ready_->take_out(i, states_[i].shard);
  }
}

std::string ShardedGradients::reason(size_t parameter) const {
  if (states_[parameter].is_by_hand) return by_hand(parameter);
  if (states_[parameter].is_lost) return GradientGuard::lost(binding_.label(parameter));
  return "the gradient of " + binding_.label(parameter) +
         " was made under no_sync() and has not been reduced: run the last backward before a step outside it, or clear "
         "it with zero_grad()";
}

std::string ShardedGradients::by_hand(size_t parameter) const {
  return binding_.label(parameter) +
         " has a gradient that was put there by hand (one of torch::autograd::grad(), say), which no step would take: "
         "gradients are in fsdp.parameters(), by backward(), as averages over the ranks";
}

bool ShardedGradients::has_gradient_by_hand(size_t parameter) const {
  const at::Tensor& tensor = binding_.tensor(parameter);
  return tensor.grad().defined() && !elsewhere_->is_in(parameter, tensor);
}

void ShardedGradients::require_none_by_hand(const Unit& unit) const {
  for (const auto& paged : unit.flat_parameters())
    for (size_t i = paged->first_parameter; i < paged->first_parameter + paged->flat.parameters().size(); ++i)
      if (has_gradient_by_hand(i) && !are_zeros(binding_.tensor(i).grad())) throw std::logic_error(by_hand(i));
}

void ShardedGradients::require_none_by_hand() const {
  for (const auto& unit : model_.units()) require_none_by_hand(*unit);
}

void ShardedGradients::forget(size_t parameter) {
  states_[parameter].is_lost = states_[parameter].is_by_hand = false;
  states_[parameter].kept.reset();
  reducer_.forget(parameter);
}

void ShardedGradients::clear(size_t parameter) {
  forget(parameter);
  not_ready_->take_out(parameter, states_[parameter].shard);
  states_[parameter].shard.mutable_grad().reset();
}

// Where shards have changed, graphs that saved the parameters before must find them changed: what require_unchanged()
// cannot tell, where a forward or a backward has come since.
void ShardedGradients::show_version(const Unit& unit) {
  const uint32_t version = unit.version();
  if (std::exchange(shown_versions_[unit.index()], version) == version) return;
  for (const auto& paged : unit.flat_parameters())
    for (const PlannedParameter& parameter : paged->flat.parameters())
      if (!parameter.tensor.is_inference()) parameter.tensor.unsafeGetTensorImpl()->bump_version();
}

// Before forward, which may save a parameter before any operator uses it.
void ShardedGradients::begin_forward() {
  for (const auto& unit : model_.units()) show_version(*unit);
}

// Autograd would find that a saved parameter was changed in place; here it is the shards that were.
void ShardedGradients::require_unchanged(const Unit& unit) const {
  const auto& seen = versions_[unit.index()];
  if (seen && *seen != unit.version())
    throw std::logic_error("the shards of " + unit.name() + " on rank " + model_.rank_text() +
                           " were modified by an inplace operation (optimizer.step(), say) between a forward and its "
                           "backward, which needs the values that forward used: step after backward");
}

void ShardedGradients::forget_versions() { std::fill(versions_.begin(), versions_.end(), std::nullopt); }

// Before its first use outside backward, recorded or not: a function with a backward of its own computes without
// autograd, and saves afterwards what it was given.
void ShardedGradients::begin_use(const Unit& unit) {
  if (!versions_[unit.index()]) show_version(unit);
}

void ShardedGradients::expect(const Unit& unit, bool backward) {
  if (!backward) {
    show_version(unit);
    versions_[unit.index()] = shown_versions_[unit.index()];
  }
  if (is_expected_[unit.index()]) return;
  is_expected_[unit.index()] = true;
  first_uses_.push_back(unit.index());
}

void ShardedGradients::follow_freezing(size_t i) {
  const at::Tensor parameter = binding_.tensor(i);
  ParameterState& state = states_[i];
  if (state.shard.requires_grad() != state.shard_requires_grad) {  // the user's freezing of a shard
    parameter.set_requires_grad(state.shard.requires_grad());
  } else if (parameter.requires_grad() != state.shard.requires_grad()) {
    state.shard.set_requires_grad(parameter.requires_grad());
  }
  state.shard_requires_grad = parameter.requires_grad();
}

void ShardedGradients::follow_freezing() {
  for (size_t i = 0; i < states_.size(); ++i) follow_freezing(i);
}

void ShardedGradients::inspect(const Unit& unit) {
  for (const auto& paged : unit.flat_parameters()) {
    for (size_t i = paged->first_parameter; i < paged->first_parameter + paged->flat.parameters().size(); ++i) {
      at::Tensor parameter = binding_.tensor(i);
      ParameterState& state = states_[i];
      follow_freezing(i);
      if (state.shard_requires_grad) {
        const c10::AutoGradMode recording(true);
        state.accumulator = torch::autograd::impl::grad_accumulator(state.shard);
      }
      if (has_hooks(state.shard))
        throw std::logic_error(binding_.label(i) +
                               ": a hook on its shard, one of fsdp.parameters(), would never be called, since autograd "
                               "makes no gradient for it: register it on the module's own parameter");
      take_gradient_by_hand(i);
      if (!elsewhere_->is_in(i, parameter)) {
        // Not told of: the user still holds the guard that was there. Or what was put there by hand is there no more.
        if (!std::exchange(state.is_cleared, false) || state.is_by_hand) clear(i);
        elsewhere_->put(i, binding_.label(i), parameter);
      }
      binding_.hook(i);
    }
  }
}

// Zeros in the guard's place are a zero_grad(): a step from now on takes them. False where there are none.
bool ShardedGradients::take_zeros_by_hand(size_t i) {
  if (!are_zeros(binding_.tensor(i).grad())) return false;
  clear(i);
  ParameterState& state = states_[i];
  if (state.shard.requires_grad()) state.shard.mutable_grad() = at::zeros_like(state.shard.detach());
  return true;
}

// What the user has put in the guard's place. Other values than zero would do nothing, unlike for an optimizer of one
// process.
void ShardedGradients::take_gradient_by_hand(size_t i) {
  if (!has_gradient_by_hand(i)) return;
  if (!take_zeros_by_hand(i)) throw std::logic_error(by_hand(i));
  states_[i].is_cleared = false;
  elsewhere_->put(i, binding_.label(i), binding_.tensor(i));
}

// ---- passes -------------------------------------------------------------------------------------

uint64_t ShardedGradients::writes() const {
  uint64_t writes = 0;
  for (const auto& unit : model_.units())
    for (const auto& paged : unit->flat_parameters()) writes += paged->flat.shard_page().writes();
  return writes;
}

// The ranks that have elements of a parameter: none of one without elements.
Range ShardedGradients::ranks_with(size_t parameter) const {
  for (const auto& paged : states_[parameter].unit->flat_parameters()) {
    const FlatLayout& layout = paged->flat.layout();
    const auto index = static_cast<int64_t>(parameter) - static_cast<int64_t>(paged->first_parameter);
    if (index < 0 || index >= layout.parameter_count() || layout.numel(index) == 0) continue;
    const int64_t first = layout.offset(index), last = first + layout.numel(index) - 1;
    return {first / layout.shard_numel(), last / layout.shard_numel() + 1};
  }
  return {};
}

// Each by what has a gradient. Else a rank that has written to nothing may have stepped: whoever writes an optimizer
// may pass over what is empty.
bool ShardedGradients::all_ranks_train() const {
  const int world = model_.mesh().shard->size();
  std::vector<bool> trains(world, false);
  for (size_t i = 0; i < states_.size(); ++i) {
    if (!trained_[i] || !has_gradient_[i]) continue;
    const Range ranks = ranks_with(i);
    std::fill(trains.begin() + ranks.begin, trains.begin() + ranks.end, true);
  }
  return std::ranges::all_of(trains, [](bool rank) { return rank; });
}

// What one rank does not do alone: the ranks compare it with what they have exchanged.
void ShardedGradients::note_what_came_before() {
  const Communicator& comm = *model_.mesh().shard;
  bool has_changed = !all_ranks_train_;
  for (size_t i = 0; i < states_.size(); ++i) {
    const bool trains = binding_.tensor(i).requires_grad();
    if (trained_[i] != trains) model_.log().add(trains ? "unfreezing" : "freezing", binding_.parameters()[i].fqn, -1);
    has_changed = has_changed || trained_[i] != trains;
    trained_[i] = trains;
    // On a device nobody looks a second time.
    if (comm.device().is_cpu() || ranks_with(i).numel() == comm.size())
      model_.log().add_kept(states_[i].shard.grad().defined(), states_[i].shard.numel() == 0);
  }
  if (has_changed || std::exchange(gradients_changed_, false)) all_ranks_train_ = all_ranks_train();
  if (writes_ && writes() != *writes_ && *all_ranks_train_) model_.log().add("a step");
  writes_ = writes_if_between();
}

// Where steps are taken while backward goes on, nobody knows which of them were before its end.
std::optional<uint64_t> ShardedGradients::writes_if_between() const {
  return reducer_.has_observer() ? std::nullopt : std::optional(writes());
}

// A parameter of a unit that others of the unit are used without: a rank that waited for its gradient until the end of
// backward would reduce the unit after its next gathers, where a rank that has one reduces it before. Not known where
// the graph has nodes of the user's, which may compute more, as checkpointing does.
void ShardedGradients::expect_what_the_graph_has() {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) return;
  std::vector<size_t> absent;
  for (const GradientBucket& bucket : reducer_.buckets()) {
    const size_t absent_before = absent.size();
    bool is_used = false;
    for (const size_t parameter : bucket.members) {
      const at::Tensor& tensor = binding_.tensor(parameter);
      if (!tensor.requires_grad()) continue;
      const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(tensor);
      const bool is_in_graph = accumulator != nullptr && nodes->contains(accumulator.get());
      if (!is_in_graph) absent.push_back(parameter);
      is_used = is_used || is_in_graph;
    }
    if (!is_used) absent.resize(absent_before);  // the unit of a part that is computed again, maybe
  }
  if (absent.empty() || std::ranges::any_of(*nodes, [](const auto* node) { return is_users(*node); })) return;
  for (const size_t parameter : absent) reducer_.expect_none(parameter);
}

void ShardedGradients::begin() {
  for (const auto& unit : model_.units())
    if (!versions_[unit->index()]) show_version(*unit);  // of the others require_unchanged() says more than autograd
  for (size_t i = 0; i < states_.size(); ++i) {
    ParameterState& state = states_[i];
    // A shard that the user has frozen since the forward gets no gradient, as a leaf would get none.
    if (state.shard_requires_grad && !state.shard.requires_grad())
      binding_.tensor(i).set_requires_grad(state.shard_requires_grad = false);
    take_gradient_by_hand(i);
    if (!elsewhere_->is_in(i, binding_.tensor(i)) && !std::exchange(state.is_cleared, false)) clear(i);
    if (not_ready_->is_in(i, state.shard)) {
      if (state.is_lost) continue;  // refused when a gradient for it comes
      state.is_by_hand = false;     // and is there no more
      not_ready_->take_out(i, state.shard);
      state.shard.mutable_grad() = std::exchange(state.kept, at::Tensor());
    } else if (reducer_.keeps(i)) {
      forget(i);  // cleared by one who still holds the guard
    } else {
      state.is_lost = false;  // likewise
    }
  }
  note_what_came_before();
  // A graph's second backward, say: in one order on all ranks, whatever their gradients come in.
  if (!first_uses_.empty()) last_uses_ = first_uses_;
  std::vector<size_t> order;
  for (auto index = last_uses_.rbegin(); index != last_uses_.rend(); ++index)
    for (size_t bucket = buckets_of_[*index]; bucket < buckets_of_[*index + 1]; ++bucket) order.push_back(bucket);
  reducer_.begin(order);
  expect_what_the_graph_has();
  std::fill(bucket_done_.begin(), bucket_done_.end(), false);
  for (size_t unit = 0; unit < incomplete_.size(); ++unit) {
    incomplete_[unit] = 0;
    for (size_t bucket = buckets_of_[unit]; bucket < buckets_of_[unit + 1]; ++bucket) {
      const auto& members = reducer_.buckets()[bucket].members;
      const bool trains = std::any_of(members.begin(), members.end(),
                                      [&](size_t parameter) { return binding_.tensor(parameter).requires_grad(); });
      if (trains) ++incomplete_[unit];
      bucket_done_[bucket] = !trains;
    }
  }
}

bool ShardedGradients::add(size_t parameter, const at::Tensor& gradient) {
  const int unit = states_[parameter].unit->index();
  if (!binding_.tensor(parameter).requires_grad()) return false;  // frozen since forward
  if (not_ready_->is_in(parameter, states_[parameter].shard)) throw std::logic_error(reason(parameter));
  const bool complete = reducer_.add(parameter, gradient);
  const size_t bucket = reducer_.bucket_of(parameter);
  if (complete && !bucket_done_[bucket]) {
    bucket_done_[bucket] = true;
    --incomplete_[unit];
  }
  return incomplete_[unit] == 0;
}

void ShardedGradients::finish() {
  reducer_.finish();
  place_guards();
  for (size_t i = 0; i < states_.size(); ++i) {
    const bool has_gradient = states_[i].shard.grad().defined();
    gradients_changed_ = gradients_changed_ || has_gradient_[i] != has_gradient;
    has_gradient_[i] = has_gradient;
  }
  writes_ = writes_if_between();
}

void ShardedGradients::end_without_reducing() {
  reducer_.end_without_reducing();
  for (size_t i = 0; i < states_.size(); ++i) {
    if (!reducer_.keeps(i)) continue;
    states_[i].kept = std::exchange(states_[i].shard.mutable_grad(), at::Tensor());
    not_ready_->put(i, binding_.label(i), states_[i].shard);
  }
  place_guards();
}

void ShardedGradients::place_guards() {
  for (size_t i = 0; i < states_.size(); ++i) {
    states_[i].is_cleared = false;
    if (!elsewhere_->is_in(i, binding_.tensor(i))) elsewhere_->put(i, binding_.label(i), binding_.tensor(i));
  }
  first_uses_.clear();
  std::fill(is_expected_.begin(), is_expected_.end(), false);
}

void ShardedGradients::fail() {
  for (size_t i = 0; i < states_.size(); ++i) {
    if (!binding_.tensor(i).requires_grad()) continue;
    states_[i].is_lost = true;
    not_ready_->put(i, binding_.label(i), states_[i].shard);
  }
}

void ShardedGradients::abandon() {
  reducer_.abandon();
  place_guards();
}

std::vector<at::Tensor> ShardedGradients::ready() const {
  require_none_by_hand();
  for (size_t i = 0; i < states_.size(); ++i)
    if (not_ready_->is_in(i, states_[i].shard)) throw std::logic_error(reason(i));
  std::vector<at::Tensor> gradients;
  for (const GradientBucket& bucket : reducer_.buckets()) {
    if (at::Tensor whole = bucket.result->whole_gradient(); whole.defined()) {
      gradients.push_back(whole);
      continue;
    }
    for (const at::Tensor& shard : bucket.result->leaves())
      if (shard.grad().defined()) gradients.push_back(shard.grad());
  }
  return gradients;
}

}  // namespace tessera::internal
