#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/gradients/binding.h"
#include "core/gradients/grad_placeholder.h"
#include "core/gradients/gradient_reducer.h"
#include "fsdp/backward_progress.h"
#include "fsdp/between_passes.h"
#include "fsdp/sharded_model.h"

namespace tessera::internal {

// FSDP's gradients: one bucket for each flat parameter, cut evenly, and the content of `.grad` (see GradState):
//
//   .grad of           after a backward     under no_sync()                  after a failed backward
//   a shard            kOrdinary, its part  kAccumulating: a placeholder,    kLost: a placeholder,
//                      of the average       and buckets keep the sums        until zero_grad()
//   the module's own   kPlaceholder: the gradients are in the shards
//
// A placeholder throws if an operator uses it. Used by one thread at a time, under no autograd; called by Scheduler.
class ShardedGradients {
 public:
  // Runs a change while no other thread uses this object: zero_grad(), which placeholders report.
  using Exclusively = std::function<void(const std::function<void()>& change)>;
  // `model` must outlive it.
  ShardedGradients(ShardedModel& model, const Exclusively& exclusively);
  ~ShardedGradients();
  ShardedGradients(const ShardedGradients&) = delete;
  ShardedGradients& operator=(const ShardedGradients&) = delete;

  Binding& binding() { return binding_; }
  GradientReducer& reducer() { return reducer_; }
  const GradientReducer& reducer() const { return reducer_; }

  // Must be called before each use of the unit outside backward, recorded or not: a function with a backward of its own
  // computes without autograd, and saves its arguments afterwards. If the shards have changed, raises the versions of
  // the unit's parameters: autograd then refuses the backward of older graphs, as it does without a wrapper.
  void show_version(const Unit& unit);
  // A forward, or a part of one that backward recomputes, uses this unit with autograd recording.
  void expect(const Unit& unit) { progress_.expect(static_cast<size_t>(unit.index())); }
  // Checks the parameters of a unit, outside of backward: hooks them again, and lets requires_grad of shard and
  // parameter follow each other. Throws std::logic_error for hooks on shards, which are never called, and for a
  // gradient that the user has put into a parameter's .grad, which no step would use.
  void inspect(const Unit& unit);
  // Lets requires_grad of all shards and parameters follow each other.
  void follow_freezing();

  void begin_forward();
  void begin();
  // Returns whether the unit has all gradients of this pass.
  bool add(size_t parameter, const at::Tensor& gradient);
  void finish();
  void end_without_reducing();
  // A backward has failed: its gradients are lost. Not collective.
  void fail();
  void abandon();

  // The gradients of all shards, without the padding of buffers, which may be NaN (int8 blocks with an infinity).
  // Throws std::logic_error if a gradient is not ready for a step.
  std::vector<at::Tensor> ready() const;
  Unit& unit_of(size_t parameter) const { return *states_[parameter].unit; }

 private:
  struct ParameterState {
    Unit* unit;
    at::Tensor shard;
    bool shard_requires_grad;                    // at the last look
    GradState in_shard = GradState::kOrdinary;   // set by passes: kAccumulating, kLost, or another
    GradState in_module = GradState::kOrdinary;  // kPlaceholder, or kOrdinary: cleared since the last look
    at::Tensor kept = {};                        // the shard's older gradient, while its state is kAccumulating
  };
  GradState state_in_shard(size_t parameter) const;
  GradState state_in_module(size_t parameter) const;
  // Each puts a placeholder into `.grad`, unless it is there.
  void place_in_module(size_t parameter);
  void place_in_modules();
  void place_in_shard(size_t parameter, GradState state);
  std::string reason(size_t parameter) const;  // the error of a use of the shard's placeholder
  void follow_freezing(size_t parameter);
  // Drops the sums of earlier passes. clear() drops `.grad` of the shard, too, and zero() replaces it by zeros.
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
  std::vector<uint32_t> shown_versions_;  // by unit: of its shards, as its parameters' versions tell autograd
  std::shared_ptr<GradPlaceholder> module_placeholders_;
  std::shared_ptr<GradPlaceholder> shard_placeholders_;
};

}  // namespace tessera::internal
