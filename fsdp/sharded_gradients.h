#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/gradients/binding.h"
#include "core/gradients/grad_placeholder.h"
#include "core/gradients/gradient_reducer.h"
#include "fsdp/backward_progress.h"
#include "fsdp/between_passes.h"
#include "fsdp/sharded_model.h"

namespace tessera::internal {

// FSDP's gradients. Each flat parameter has one bucket, cut evenly. Contents of `.grad` (see GradState):
//
//   .grad of           after a backward     under no_sync()                  after a failed backward
//   a shard            kOrdinary, its part  kAccumulating: a placeholder,    kLost: a placeholder,
//                      of the average       and buckets keep the sums        until zero_grad()
//   the module's own   kPlaceholder: the gradients are in the shards
//
// A placeholder throws if an operator uses it. Used by one thread at a time, without autograd; called by Scheduler.
class ShardedGradients {
 public:
  // Runs `change` while no other thread uses this object. Placeholders call this function when zero_grad() clears them.
  using Exclusively = std::function<void(const std::function<void()>& change)>;
  // `model` must outlive this object.
  ShardedGradients(ShardedModel& model, const Exclusively& exclusively);
  ~ShardedGradients();
  ShardedGradients(const ShardedGradients&) = delete;
  ShardedGradients& operator=(const ShardedGradients&) = delete;

  Binding& binding() { return binding_; }
  GradientReducer& reducer() { return reducer_; }
  const GradientReducer& reducer() const { return reducer_; }

  // Must be called before each use of the unit outside backward. If the shards have changed, raises the versions of the
  // unit's parameters, so that autograd refuses the backward of older graphs. Must be called even with autograd off,
  // because a custom autograd function computes with autograd off, and saves its arguments afterwards.
  void show_version(const Unit& unit);
  // Must be called when forward uses the unit while autograd records, or in a part that backward will recompute.
  void expect(const Unit& unit) { progress_.expect(static_cast<size_t>(unit.index())); }
  // Must be called outside backward. Restores lost hooks, and copies changes of requires_grad between shard and
  // parameter. Throws std::logic_error for a hook on a shard, because autograd would never call the hook. Also throws
  // if the user assigned a gradient to a parameter's `.grad`, because no step would use this gradient.
  void inspect(const Unit& unit);
  // Copies changes of requires_grad between all shards and their parameters.
  void follow_freezing();

  void begin_forward();
  void begin();
  // Adds a gradient. Returns whether the unit has all gradients of this pass now.
  bool add(size_t parameter, const at::Tensor& gradient);
  void finish();
  void end_without_reducing();
  // Must be called after a failed backward. All gradients are lost: a step throws until zero_grad(). Not collective.
  void fail();
  void abandon();

  // Returns the defined gradients of the shards. Excludes the padding, which may be NaN if int8 blocks encoded an
  // infinity. Throws std::logic_error if a gradient is kAccumulating or kLost.
  std::vector<at::Tensor> ready() const;
  Unit& unit_of(size_t parameter) const { return *states_[parameter].unit; }

 private:
  struct ParameterState {
    Unit* unit;
    at::Tensor shard;
    bool shard_requires_grad;                    // requires_grad() of `shard` at the last check
    GradState in_shard = GradState::kOrdinary;   // kAccumulating or kLost while `.grad` is a placeholder
    GradState in_module = GradState::kOrdinary;  // kPlaceholder; kOrdinary if cleared since the last check
    at::Tensor kept = {};                        // kAccumulating: the shard's own `.grad`, set aside
  };
  GradState state_in_module(size_t parameter) const;
  // The next three functions put placeholders into `.grad`, unless they are already there.
  void place_in_module(size_t parameter);
  void place_in_modules();
  void place_in_shard(size_t parameter, GradState state);
  std::string reason(size_t parameter) const;  // the error text of the shard's placeholder
  void follow_freezing(size_t parameter);
  // forget() drops the sums of earlier passes. clear() also resets the shard's `.grad`. zero() zeros a defined `.grad`.
  void forget(size_t parameter);
  void clear(size_t parameter);
  void zero(size_t parameter);
  void make_buckets();
  void make_placeholders(const Exclusively& exclusively);

  ShardedModel& model_;
  Binding binding_;
  GradientReducer reducer_;
  BackwardProgress progress_;
  BetweenPasses between_passes_;
  std::vector<ParameterState> states_;    // by parameter
  std::vector<uint32_t> shown_versions_;  // by unit: Unit::version() at the latest show_version()
  std::shared_ptr<GradPlaceholder> module_placeholders_;
  std::shared_ptr<GradPlaceholder> shard_placeholders_;
};

}  // namespace tessera::internal
