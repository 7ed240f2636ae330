// Construction of ShardedGradients, placeholders in `.grad`, and checks before a forward. The passes are in
// sharded_gradients.cpp.
#include <ATen/ops/zeros_like.h>

#include <stdexcept>
#include <utility>

#include "fsdp/sharded_gradients.h"

namespace tessera::internal {
namespace {

ReducerOptions reducer_options(ShardedModel& model) {
  ReducerOptions options;
  options.refuse_uneven_use = model.options().refuse_uneven_use;
  options.check_finite = model.options().check_finite;
  options.zero_copy_bytes = model.options().zero_copy_bytes;
  options.max_lazy_in_flight = 0;  // in flight, a lazy reduction moves no data, but holds a unit and receive buffers
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
      std::vector<size_t> members;
      for (const at::Tensor& shard : flat.parameter_shards()) {
        members.push_back(states_.size());
        states_.push_back({unit.get(), shard, shard.requires_grad()});
      }
      buckets.push_back({flat.name(), std::move(members), flat.geometries(), flat.layout(), /*owner=*/0,
                         flat.reduce_dtype(), /*wire_dtype=*/std::nullopt, wire, &flat.gradient(),
                         model_.offloads_gradients(*unit)});
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
        if (binding_.tensor(parameter).requires_grad() && !states_[parameter].shard_requires_grad)
          return binding_.label(parameter) +
                 " was unfrozen in forward after the first use of its unit: unfreeze it before";
        return "the gradient of " + binding_.label(parameter) +
               " is in the wrapper's shards: build optimizers from fsdp.parameters(), after wrapping, and clip with "
               "fsdp.clip_grad_norm_()";
      },
      locked([this](size_t parameter) {  // called if module->zero_grad() resets `.grad`
        clear(parameter);
        states_[parameter].in_module = GradState::kOrdinary;
      }),
      locked([this](size_t parameter) { zero(parameter); })});
  shard_placeholders_ = std::make_shared<GradPlaceholder>(GradPlaceholder::Events{
      [this](size_t parameter) { return reason(parameter); }, locked([this](size_t parameter) { forget(parameter); }),
      locked([this](size_t parameter) { zero(parameter); })});
}

// Removes the placeholders, because they may outlive this object and would then call it.
ShardedGradients::~ShardedGradients() {
  for (size_t i = 0; i < states_.size(); ++i) {
    module_placeholders_->take_out(i, binding_.tensor(i));
    shard_placeholders_->take_out(i, states_[i].shard);
  }
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
  clear(parameter);  // not zero_(), which would call zero() again
  grad = at::zeros_like(states_[parameter].shard.detach());
}

// ---- checks before a forward --------------------------------------------------------------------------

void ShardedGradients::follow_freezing(size_t i) {
  const at::Tensor parameter = binding_.tensor(i);
  ParameterState& state = states_[i];
  if (state.shard.requires_grad() != state.shard_requires_grad)  // the user has changed the shard's requires_grad
    parameter.set_requires_grad(state.shard.requires_grad());
  else if (parameter.requires_grad() != state.shard.requires_grad())
    state.shard.set_requires_grad(parameter.requires_grad());
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
      // The user has cleared `.grad`, but kept a reference to the placeholder, which therefore has not called clear().
      if (in_module == GradState::kOrdinary && states_[i].in_module == GradState::kPlaceholder) clear(i);
      place_in_module(i);
      binding_.hook(i);
    }
  }
}

}  // namespace tessera::internal
