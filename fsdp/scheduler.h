#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/model/grad_norm.h>
#include "core/gradients/backward_pass.h"
#include "core/paging/residency.h"
#include "core/trace/open_span.h"
#include "fsdp/prefetch_order.h"
#include "fsdp/sharded_gradients.h"
#include "fsdp/sharded_model.h"

namespace tessera::internal {

// Unshards and reshards units: prefetches FsdpOptions::prefetch units ahead, keeps the last FsdpOptions::keep_recent
// units, and evicts the least recently used ones. No other class unshards or reshards units, except for a summon. Used
// by one thread at a time.
class UnshardedUnits {
 public:
  explicit UnshardedUnits(ShardedModel& model) : model_(model) {}

  // Begin a pass. pre_forward() also reshards units that an earlier pass prefetched but did not use.
  void pre_forward();
  void pre_backward();
  // Reshards the used units except those of the last use(). A no-op for fewer than 8 units or !reshard_after_forward.
  void post_forward();
  // Must be called before an operator uses the units `needed`. Evicts other units, unshards `needed`, and prefetches
  // the units that followed them in the last pass. Collective.
  void use(const std::vector<Unit*>& needed, Page::GradMode mode, bool backward);
  void reshard(Unit& unit);
  void reshard_all();
  // Must be called after a backward. `accumulates`: whether the next forward continues an accumulation, without a step
  // before it. That forward begins with pre_forward(), or with the next use() outside backward.
  void post_backward(bool accumulates);

  void end_compute_span();  // ends the trace span for the computation of the last use()'s units
  // Return the unit orders of forward and of backward: of the current pass, and of the previous one (PrefetchOrder).
  const PrefetchOrder& forward_order() const { return forward_order_; }
  const PrefetchOrder& backward_order() const { return backward_order_; }
  // Above this number of uses, PrefetchOrder::forget_repetition() is called. A pass rarely uses a unit 8 times.
  size_t most_seen() const { return 8 * model_.units().size(); }

 private:
  void drop_secondaries();
  void evict_for(const std::vector<Unit*>& needed, bool is_first_of_backward);
  void prefetch(const PrefetchOrder& order);
  void set_current(std::vector<Unit*> units, Page::GradMode mode);

  ShardedModel& model_;
  PrefetchOrder forward_order_;
  PrefetchOrder backward_order_;
  bool forward_is_new_ = true;  // true: the next use() outside backward begins a forward
  bool accumulates_ = false;    // whether the next forward continues an accumulation, with unchanged shards
  std::vector<Unit*> recent_;   // used units that are still unsharded, the most recent last
  std::vector<Unit*> current_;  // the units of the last use()
  OpenSpan computing_;          // the trace's span of `current_`
};

// Runs the phases of FSDP training on three events: an operator is about to use parameters, autograd has computed a
// gradient, or a backward ends or fails.
//
//   use(unit)   unshard the unit, evict and prefetch other units (UnshardedUnits)
//   gradient    pass it to the reducer; after the unit's last gradient, reshard the unit
//   end         reduce the remaining buckets; reshard all units, because the optimizer changes the shards next
class Scheduler : public Pager, public BackwardPass {
 public:
  // Shards the module. Collective.
  static std::shared_ptr<Scheduler> wrap(torch::nn::Module& module, std::shared_ptr<Communicator> comm,
                                         const FsdpOptions& options);

  std::shared_ptr<void> use(const std::vector<Page*>& pages) override;
  bool refuse(const Page& page, const at::Tensor& view, const std::string& operation) override;
  void before_write(int index) override;
  void set_divisor(double divisor) override;
  std::optional<double> divisor() const override;
  void prepare_capture() override;
  void prepare_replay() override;

  ScopeExit pre_forward();  // the returned scope must close after forward, before this object is destroyed
  void post_forward();      // must be called after a forward that did not throw
  void observe_gradients(GradientReducer::Observer observer, std::function<void()> failed);
  void refuse_use(std::string reason);  // later uses outside backward throw std::logic_error; "" permits uses again
  void summon(const SummonOptions& options);
  void dismiss(bool writeback);
  // Must be called before a save. Copies the user's changes of parameters into the shards. A no-op in a backward. Not
  // collective. Throws the errors of Unit::write_back() and reattach().
  void show_in_shards();
  // Returns the shards. Outside backward, first applies the user's changes of parameters and of requires_grad.
  const std::vector<NamedShard>& named_shards();
  // Whether all units are summoned, so that parameters have their own dtype despite mixed precision.
  bool shows_exact_values() const;

  const ShardedModel& model() const { return model_; }
  GradNorm clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite);
  void visit_full_state(const ShardedModel::VisitState& visit, const StateDictOptions& options);
  MemoryReport memory() const;
  void reset_peak_memory();
  std::string describe() const;

 protected:
  void begin() override;
  void end() override;
  void fail() override { gradients_.fail(); }
  void abandon(bool reduced) override;
  void after_end() override { tell_observer(); }
  std::string name() const override;
  void after_failure() override;

 private:
  Scheduler(torch::nn::Module& module, std::shared_ptr<Communicator> comm, const FsdpOptions& options);

  at::Tensor take(size_t parameter, const at::Tensor& gradient);
  void begin_look();
  void inspect(Unit& unit);
  void tell_observer();
  void dismiss_units(bool writeback);
  void require_use(const std::string& use) const;
  void require_capturable() const;

  ShardedModel model_;
  ShardedGradients gradients_;
  UnshardedUnits unsharded_;
  GradientReducer::Observer observer_;               // called without the mutex
  std::vector<std::vector<at::Tensor>> to_observe_;  // by bucket: leaves with final gradients, for the next observer_()
  std::function<void()> observer_of_failures_;
  std::string refusal_;  // the reason to refuse uses of parameters outside backward; empty: permits them
  bool first_backward_ = true;
  Summon summon_ = Summon::kNone;
};

}  // namespace tessera::internal
