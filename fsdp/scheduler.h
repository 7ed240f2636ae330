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
#include "fsdp/full_state.h"
#include "fsdp/resident_units.h"
#include "fsdp/sharded_gradients.h"
#include "fsdp/sharded_model.h"

namespace tessera::internal {

// Decides what happens when, driven by events: an operator is about to use parameters (use()), a gradient has been
// computed (take()), a backward has ended, or failed.
//
//   use(unit)   make it resident, which evicts and prefetches others (ResidentUnits)
//   gradient    hand it to the reducer; when it was its unit's last, release the unit
//   end         reduce what is left, release everything: the optimizer changes the shards next
class Scheduler : public Pager, public BackwardPass {
 public:
  // Shards the module. Collective.
  static std::shared_ptr<Scheduler> wrap(torch::nn::Module& module, std::shared_ptr<Communicator> comm,
                                         const FsdpOptions& options);

  void use(const std::vector<Page*>& pages) override;
  bool refuse(const Page& page, const at::Tensor& view, const std::string& operation) override;
  void before_write(int index) override;
  void set_divisor(double divisor) override;

  ScopeExit begin_forward();  // ends where forward does, within this object's life
  void end_forward();         // of one that returns
  void observe_gradients(GradientReducer::Observer observer, std::function<void()> failed);
  void refuse_use(std::string reason);  // empty: no longer
  void summon(const SummonOptions& options);
  void dismiss(bool writeback);
  // The shards become what the module's parameters show, for who reads them. Not collective.
  void show_in_shards();
  // The same, and of which parameters train, for who is given the shards; a backward that goes on sees no change.
  const std::vector<NamedShard>& named_shards();
  // Whether parameters are in their own dtype now, whatever mixed precision computes in: all units are pinned.
  bool shows_exact_values() const;

  const ShardedModel& model() const { return model_; }
  GradNorm clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite);
  void visit_full_state(const VisitState& visit, const StateDictOptions& options);
  MemoryReport memory() const;
  void reset_peak_memory();
  std::string describe() const;

 protected:
  void begin() override;
  void end() override;
  void fail() override { gradients_.fail(); }
  void abandon() override;
  void after_failure() override;

 private:
  Scheduler(torch::nn::Module& module, std::shared_ptr<Communicator> comm, const FsdpOptions& options);

  at::Tensor take(size_t parameter, const at::Tensor& gradient);
  void begin_look();
  void inspect(Unit& unit);
  void inspect_all();
  void require_outside_backward(const char* call) const;
  void require_use(const std::string& use) const;

  ShardedModel model_;
  ShardedGradients gradients_;
  ResidentUnits resident_;
  std::function<void()> observer_of_failures_;
  std::string refusal_;  // why nobody may use the parameters outside backward
  bool first_backward_ = true;
  bool summoned_ = false;
  bool summoned_to_host_ = false;
  bool summoned_elsewhere_ = false;  // on rank 0 only, and this is another
};

}  // namespace tessera::internal
