#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/model/grad_norm.h>
#include "core/gradients/backward_pass.h"
#include "core/paging/residency.h"
#include "fsdp/sharded_gradients.h"
#include "fsdp/sharded_model.h"
#include "fsdp/unsharded_units.h"

namespace tessera::internal {

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

  void use(const std::vector<Page*>& pages) override;
  bool refuse(const Page& page, const at::Tensor& view, const std::string& operation) override;
  void before_write(int index) override;
  void set_divisor(double divisor) override;
  std::optional<double> divisor() const override;
  void prepare_capture() override;
  void prepare_replay() override;

  ScopeExit pre_forward();  // the returned scope must close after forward, before this object is destroyed
  void post_forward();      // called after a forward that did not throw
  void observe_gradients(GradientReducer::Observer observer, std::function<void()> failed);
  void refuse_use(std::string reason);  // an empty reason permits use again
  void summon(const SummonOptions& options);
  void dismiss(bool writeback);
  // Must be called before a save. Copies changed values of the module's parameters into the shards. Not collective.
  void show_in_shards();
  // Returns the shards. Outside backward, first applies the user's changes of parameters and of requires_grad.
  const std::vector<NamedShard>& named_shards();
  // Whether parameters have their own dtype now, despite mixed precision. True while all units are summoned.
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
  void abandon() override;
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
  std::vector<std::vector<at::Tensor>> to_observe_;  // by bucket: leaves with final gradients that are not observed yet
  std::function<void()> observer_of_failures_;
  std::string refusal_;  // the reason to refuse uses outside backward; empty: uses are permitted
  bool first_backward_ = true;
  Summon summon_ = Summon::kNone;
};

}  // namespace tessera::internal
