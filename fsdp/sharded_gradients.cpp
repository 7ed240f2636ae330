#include "fsdp/sharded_gradients.h"

#include <algorithm>
#include <stdexcept>

#include "core/runtime/graph_recorder.h"

namespace tessera::internal {

void ShardedGradients::show_version(const Unit& unit) {
  const uint32_t version = unit.version();
  if (std::exchange(shown_versions_[unit.index()], version) == version) return;
  for (const auto& paged : unit.flat_parameters())
    for (const PlannedParameter& parameter : paged->flat.parameters())
      if (!parameter.tensor.is_inference()) parameter.tensor.unsafeGetTensorImpl()->bump_version();
}

// Raises versions before forward begins: an autograd function may save a parameter before any operator uses it.
void ShardedGradients::begin_forward() {
  for (const auto& unit : model_.units()) show_version(*unit);
}

void ShardedGradients::begin() {
  for (const auto& unit : model_.units()) show_version(*unit);
  for (size_t i = 0; i < states_.size(); ++i) {
    ParameterState& state = states_[i];
    // If the user froze the shard since the forward, it gets no gradient, like any frozen leaf.
    if (state.shard_requires_grad && !state.shard.requires_grad())
      binding_.tensor(i).set_requires_grad(state.shard_requires_grad = false);
    if (state_in_module(i) != GradState::kPlaceholder && state.in_module == GradState::kPlaceholder) clear(i);
    const GradState in_shard = shard_placeholders_->is_in(i, state.shard) ? state.in_shard : GradState::kOrdinary;
    if (in_shard == GradState::kLost) continue;  // if a gradient arrives, add() throws an error
    if (in_shard == GradState::kAccumulating) {
      shard_placeholders_->take_out(i, state.shard);
      state.shard.mutable_grad() = std::exchange(state.kept, at::Tensor());
      state.in_shard = GradState::kOrdinary;
    } else {
      forget(i);  // the user may have cleared `.grad` and kept a reference to the placeholder
    }
  }
  between_passes_.pass_begins(reducer_.has_observer());
  reducer_.begin(progress_.begin([this](size_t bucket) {
    return std::ranges::any_of(reducer_.buckets()[bucket].members,
                               [this](size_t parameter) { return binding_.tensor(parameter).requires_grad(); });
  }));
}

bool ShardedGradients::add(size_t parameter, const at::Tensor& gradient) {
  if (!binding_.tensor(parameter).requires_grad()) return false;  // the parameter was frozen after forward
  CapturedWork::require_own(states_[parameter].shard, [&] { return binding_.label(parameter); });
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
