#pragma once

#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/gradients/binding.h"
#include "core/gradients/gradient_guard.h"
#include "core/gradients/gradient_reducer.h"
#include "fsdp/sharded_model.h"

namespace tessera::internal {

// The policy of gradients where parameters are in shards: a bucket for each flat parameter, cut evenly; what is in
// the .grad of a shard, of the module's own parameter, and of both when that is not what a step may take.
//
//   .grad of           after a backward     under no_sync()                after a backward that failed
//   a shard            part of the average  a guard: buckets keep sums      a guard, until zero_grad()
//   the module's own   a guard: the gradients are in the shards
//
// Used by one thread at a time, under no autograd; who calls what when is the Scheduler's business.
class ShardedGradients {
 public:
  // `model` outlives it; guards tell of clearing under `mutex`.
  ShardedGradients(ShardedModel& model, std::recursive_mutex& mutex);
  ~ShardedGradients();
  ShardedGradients(const ShardedGradients&) = delete;
  ShardedGradients& operator=(const ShardedGradients&) = delete;

  Binding& binding() { return binding_; }
  GradientReducer& reducer() { return reducer_; }
  const GradientReducer& reducer() const { return reducer_; }

  void begin_use(const Unit& unit);
  // A forward, or a part of one that `backward` computes again, used this unit with autograd recording: gradients for
  // it will come.
  void expect(const Unit& unit, bool backward);
  // Throws std::logic_error if the unit's shards have changed since a forward that backward belongs to.
  void require_unchanged(const Unit& unit) const;
  void forget_versions();
  // Looks for what has happened to the parameters of a unit, outside of a backward: hooks them anew, has requires_grad
  // of shard and parameter follow each other. Throws std::logic_error for hooks on shards, which nobody would call.
  void inspect(const Unit& unit);
  // The last of these alone, of all parameters: for who is given the shards now.
  void follow_freezing();

  // Throws std::logic_error, naming it, for a parameter of the unit, or of all, into whose .grad the user has put
  // something, which a step would not take.
  void require_none_by_hand(const Unit& unit) const;
  void require_none_by_hand() const;

  void begin_forward();
  void begin();
  // Returns whether the unit has all gradients of this pass.
  bool add(size_t parameter, const at::Tensor& gradient);
  void finish();
  void end_without_reducing();
  // A backward has failed: its gradients are not to be stepped with. Not collective.
  void fail();
  void abandon();

  // The gradients of all shards: of a flat parameter as one tensor where they lie in its buffer. Throws
  // std::logic_error where they are not ready for a step.
  std::vector<at::Tensor> ready() const;
  Unit& unit_of(size_t parameter) const { return *states_[parameter].unit; }

 private:
  struct ParameterState {
    Unit* unit;
    at::Tensor shard;
    bool shard_requires_grad;  // as it was at the last look
    bool is_lost = false;      // its gradient, by a backward that failed
    bool is_cleared = false;   // by way of the parameter's, since the last look
    bool is_by_hand = false;   // a guard stands for what the user has put into the parameter's
    at::Tensor kept = {};      // the shard's gradient of before, while a guard stands for what buckets keep
    // The shard's, which autograd holds only weakly: by it autograd knows a shard that it is asked for (AskedEngine).
    decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>())) accumulator = {};
  };
  void place_guards();  // where they belong, after a pass
  void follow_freezing(size_t parameter);
  void show_version(const Unit& unit);
  std::string reason(size_t parameter) const;
  std::string by_hand(size_t parameter) const;
  bool has_gradient_by_hand(size_t parameter) const;
  void forget(size_t parameter);
  bool take_zeros_by_hand(size_t parameter);
  void take_gradient_by_hand(size_t parameter);
  void clear(size_t parameter);
  void make_buckets();
  void make_guards();
  uint64_t writes() const;
  std::optional<uint64_t> writes_if_between() const;
  Range ranks_with(size_t parameter) const;
  bool all_ranks_train() const;
  void note_what_came_before();
  void expect_what_the_graph_has();

  ShardedModel& model_;
  std::recursive_mutex& mutex_;
  Binding binding_;
  GradientReducer reducer_;
  std::vector<ParameterState> states_;             // by parameter
  std::vector<size_t> buckets_of_;                 // by unit: its first bucket; and their end
  std::vector<int> first_uses_;                    // units in order of their first use since the last backward
  std::vector<int> last_uses_;                     // or in the backward before, where there was none
  std::vector<bool> is_expected_;                  // by unit
  std::vector<std::optional<uint32_t>> versions_;  // by unit: of its shards when forward recorded their use
  std::vector<uint32_t> shown_versions_;           // by unit: of its shards, as its parameters' versions tell autograd
  std::vector<int64_t> incomplete_;                // by unit: its buckets that miss gradients of this pass
  std::vector<bool> bucket_done_;
  std::vector<bool> trained_;                 // by parameter: required a gradient in the last pass
  std::vector<bool> has_gradient_;            // by parameter: its shards have, since the last pass that reduced
  bool gradients_changed_ = false;            // which ones have
  std::optional<bool> all_ranks_train_;       // as these say
  std::optional<uint64_t> writes_;            // to all shards, when the last pass that reduced ended
  std::shared_ptr<GradientGuard> elsewhere_;  // in the module's own parameters
  std::shared_ptr<GradientGuard> not_ready_;  // in shards
};

}  // namespace tessera::internal
