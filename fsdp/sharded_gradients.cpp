#include "fsdp/sharded_gradients.h"

#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace tessera::internal {
namespace {

ReducerOptions reducer_options(ShardedModel& model) {
  ReducerOptions options;
  options.refuse_uneven_use = model.options().refuse_uneven_use;
  options.check_finite = model.options().check_finite;
  options.zero_copy_bytes = model.options().zero_copy_bytes;
  options.max_lazy_in_flight = 0;  // each holds a whole unit, and room for what the peers send
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

}  // namespace

ShardedGradients::ShardedGradients(ShardedModel& model, const Exclusively& exclusively)
    : model_(model),
      binding_(model.module(), model.parameters(), "FullyShardedDataParallel", model.mesh().world->rank()),
      reducer_(binding_.parameters(), model.mesh(), model.log(), reducer_options(model)),
      between_passes_(model),
      shown_versions_(model.units().size()) {
  make_buckets();
  make_placeholders(exclusively);
  place_in_modules();
}

void ShardedGradients::make_buckets() {
  std::vector<GradientBucket> buckets;
  std::vector<size_t> first_buckets;
  for (auto& unit : model_.units()) {
    first_buckets.push_back(buckets.size());
    shown_versions_[unit->index()] = unit->version();
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
      }
      buckets.push_back(std::move(bucket));
    }
  }
  first_buckets.push_back(buckets.size());
  progress_.set_buckets(std::move(first_buckets));
  reducer_.set_buckets(std::move(buckets));
}

// ---- the content of .grad -------------------------------------------------------------------------

void ShardedGradients::make_placeholders(const Exclusively& exclusively) {
  auto locked = [this, exclusively](auto call) {
    return [this, exclusively, call](size_t parameter) { exclusively([&] { call(parameter); }); };
  };
  module_placeholders_ = std::make_shared<GradPlaceholder>(GradPlaceholder::Events{
      [this](size_t parameter) {
        return "the gradient of " + binding_.label(parameter) +
               " is in the wrapper's shards: build optimizers from fsdp.parameters(), after wrapping, and clip with "
               "fsdp.clip_grad_norm_()";
      },
      locked([this](size_t parameter) {  // module->zero_grad()
        clear(parameter);
        states_[parameter].in_module = GradState::kOrdinary;
      }),
      locked([this](size_t parameter) { zero(parameter); })});
  shard_placeholders_ = std::make_shared<GradPlaceholder>(GradPlaceholder::Events{
      [this](size_t parameter) { return reason(parameter); }, locked([this](size_t parameter) { forget(parameter); }),
      locked([this](size_t parameter) { zero(parameter); })});
}

// A placeholder that outlives this object must not call it.
ShardedGradients::~ShardedGradients() {
  for (size_t i = 0; i < states_.size(); ++i) {
    module_placeholders_->take_out(i, binding_.tensor(i));
    shard_placeholders_->take_out(i, states_[i].shard);
  }
}

GradState ShardedGradients::state_in_shard(size_t parameter) const {
  const ParameterState& state = states_[parameter];
  if (shard_placeholders_->is_in(parameter, state.shard)) return state.in_shard;
  return GradState::kOrdinary;
}

GradState ShardedGradients::state_in_module(size_t parameter) const {
  if (module_placeholders_->is_in(parameter, binding_.tensor(parameter))) return GradState::kPlaceholder;
  return binding_.tensor(parameter).grad().defined() ? GradState::kUsers : GradState::kOrdinary;
}

void ShardedGradients::place_in_shard(size_t parameter, GradState state) {
  states_[parameter].in_shard = state;
  shard_placeholders_->put(parameter, binding_.label(parameter), states_[parameter].shard);
}

void ShardedGradients::place_in_module(size_t parameter) {
  states_[parameter].in_module = GradState::kPlaceholder;
  module_placeholders_->put(parameter, binding_.label(parameter), binding_.tensor(parameter));
}

void ShardedGradients::place_in_modules() {
  for (size_t i = 0; i < states_.size(); ++i) place_in_module(i);
}

std::string ShardedGradients::reason(size_t parameter) const {
  if (states_[parameter].in_shard == GradState::kLost) return GradPlaceholder::lost(binding_.label(parameter));
  return "the gradient of " + binding_.label(parameter) +
         " was made under no_sync() and has not been reduced: run the last backward before a step outside it, or clear "
         "it with zero_grad()";
}

void ShardedGradients::forget(size_t parameter) {
  states_[parameter].in_shard = GradState::kOrdinary;
  states_[parameter].kept.reset();
  reducer_.forget(parameter);
}

void ShardedGradients::clear(size_t parameter) {
  forget(parameter);
  shard_placeholders_->take_out(parameter, states_[parameter].shard);
  states_[parameter].shard.mutable_grad().reset();
}

void ShardedGradients::zero(size_t parameter) {
  at::Tensor& grad = states_[parameter].shard.mutable_grad();
  if (!shard_placeholders_->is_in(parameter, states_[parameter].shard)) {
    if (grad.defined()) grad.zero_();
    return;
  }
  clear(parameter);  // zero_() on the placeholder would call back
  grad = at::zeros_like(states_[parameter].shard.detach());
}

// ---- forward --------------------------------------------------------------------------------------

void ShardedGradients::show_version(const Unit& unit) {
  const uint32_t version = unit.version();
  if (std::exchange(shown_versions_[unit.index()], version) == version) return;
  for (const auto& paged : unit.flat_parameters())
    for (const PlannedParameter& parameter : paged->flat.parameters())
      if (!parameter.tensor.is_inference()) parameter.tensor.unsafeGetTensorImpl()->bump_version();
}

// Forward may save a parameter before any operator uses it.
void ShardedGradients::begin_forward() {
  for (const auto& unit : model_.units()) show_version(*unit);
}

void ShardedGradients::follow_freezing(size_t i) {
  const at::Tensor parameter = binding_.tensor(i);
  ParameterState& state = states_[i];
  if (state.shard.requires_grad() != state.shard_requires_grad) {  // the user has changed the shard's
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
      follow_freezing(i);
      if (has_hooks(states_[i].shard))
        throw std::logic_error(binding_.label(i) +
                               ": a hook on its shard, one of fsdp.parameters(), would never be called, since autograd "
                               "makes no gradient for it: register it on the module's own parameter");
      const GradState in_module = state_in_module(i);
      if (in_module == GradState::kUsers)
        throw std::logic_error(
            binding_.label(i) +
            " has a gradient that was put there by hand (one of torch::autograd::grad(), say), which no step would "
            "take: gradients are in fsdp.parameters(), by backward(), as averages over the ranks");
      // If the user still holds the placeholder, clearing was not reported.
      if (in_module == GradState::kOrdinary && states_[i].in_module == GradState::kPlaceholder) clear(i);
      place_in_module(i);
      binding_.hook(i);
    }
  }
}

// ---- passes ---------------------------------------------------------------------------------------

void ShardedGradients::begin() {
  for (const auto& unit : model_.units()) show_version(*unit);
  for (size_t i = 0; i < states_.size(); ++i) {
    ParameterState& state = states_[i];
    // A shard that the user has frozen since the forward gets no gradient, like any leaf.
    if (state.shard_requires_grad && !state.shard.requires_grad())
      binding_.tensor(i).set_requires_grad(state.shard_requires_grad = false);
    if (state_in_module(i) != GradState::kPlaceholder && state.in_module == GradState::kPlaceholder) clear(i);
    const GradState in_shard = state_in_shard(i);
    if (in_shard == GradState::kLost) continue;  // add() throws
    if (in_shard == GradState::kAccumulating) {
      shard_placeholders_->take_out(i, state.shard);
      state.shard.mutable_grad() = std::exchange(state.kept, at::Tensor());
      state.in_shard = GradState::kOrdinary;
    } else {
      forget(i);  // a no-op, unless the user cleared the gradient and still holds the placeholder
    }
  }
  between_passes_.pass_begins(reducer_.has_observer());
  reducer_.begin(progress_.begin([this](size_t bucket) {
    return std::ranges::any_of(reducer_.buckets()[bucket].members,
                               [this](size_t parameter) { return binding_.tensor(parameter).requires_grad(); });
  }));
}

bool ShardedGradients::add(size_t parameter, const at::Tensor& gradient) {
  if (!binding_.tensor(parameter).requires_grad()) return false;  // frozen since forward
  if (shard_placeholders_->is_in(parameter, states_[parameter].shard)) throw std::logic_error(reason(parameter));
  const auto unit = static_cast<size_t>(states_[parameter].unit->index());
  if (reducer_.add(parameter, gradient)) progress_.complete(unit, reducer_.bucket_of(parameter));
  return progress_.is_complete(unit);
}

void ShardedGradients::finish() {
  reducer_.finish();
  place_in_modules();
  progress_.end();
  between_passes_.pass_ended(reducer_.has_observer());
}

void ShardedGradients::end_without_reducing() {
  reducer_.end_without_reducing();
  for (size_t i = 0; i < states_.size(); ++i) {
    if (!reducer_.keeps(i)) continue;
    states_[i].kept = std::exchange(states_[i].shard.mutable_grad(), at::Tensor());
    place_in_shard(i, GradState::kAccumulating);
  }
  place_in_modules();
  progress_.end();
}

void ShardedGradients::fail() {
  for (size_t i = 0; i < states_.size(); ++i)
    if (binding_.tensor(i).requires_grad()) place_in_shard(i, GradState::kLost);
}

void ShardedGradients::abandon() {
  reducer_.abandon();
  place_in_modules();
  progress_.end();
}

std::vector<at::Tensor> ShardedGradients::ready() const {
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < states_.size(); ++i) {
    const at::Tensor& shard = states_[i].shard;
    if (shard_placeholders_->is_in(i, shard)) throw std::logic_error(reason(i));
    if (shard.grad().defined()) gradients.push_back(shard.grad());
  }
  return gradients;
}

}  // namespace tessera::internal
