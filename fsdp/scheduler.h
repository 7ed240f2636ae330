#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tessera/flat/backward_pass.h"
#include "tessera/fsdp/sharded_gradients.h"
#include "tessera/fsdp/sharded_model.h"
#include "tessera/paging/prefetch_order.h"
#include "tessera/paging/residency.h"
#include "tessera/trace/trace.h"

namespace tessera {

// Decides which units are resident when. Sole writer of the units' states.
//
// Driven by events: an operator is about to use parameters (use()), a gradient has been computed
// (take()), a backward has ended, or failed. From these it evicts, gathers, prefetches and reduces:
//
//   use(unit)   evict the least recently used units beyond keep_recent; gather the unit, unless a
//               prefetch did; then start gathering the units that followed it last time
//   gradient    hand it to the reducer; when it was its unit's last, release the unit
//   end         reduce what is left, release everything: the optimizer changes the shards next
//
// The autograd engine calls back from its own threads where a device has one, never at the same
// time as the user's thread runs; the mutex makes that hand-over safe. It is recursive, since what calls back to the
// user (visitors, observers) may be answered by calls.
class Scheduler : public Pager, public std::enable_shared_from_this<Scheduler> {
 public:
  // Shards the module. Collective.
  static std::shared_ptr<Scheduler> wrap(torch::nn::Module& module, std::shared_ptr<Communicator> comm,
                                         const FsdpOptions& options);

  void use(const std::vector<Page*>& pages) override;
  void refuse(const Page& page, const at::Tensor& view, const std::string& operation) override;

  void begin_forward();
  void observe_gradients(GradientReducer::Observer observer);
  void set_sync(bool sync);
  bool sync() const { return sync_; }
  void set_divisor(double divisor);
  void summon(const SummonOptions& options);
  void dismiss(bool writeback);

  const ShardedModel& model() const { return model_; }
  double clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite);
  void visit_full_state(const ShardedModel::VisitState& visit, const StateDictOptions& options);
  torch::OrderedDict<std::string, at::Tensor> full_state_dict(const StateDictOptions& options);
  MemoryReport memory() const;
  void reset_peak_memory();
  std::string describe() const;

 private:
  Scheduler(torch::nn::Module& module, std::shared_ptr<Communicator> comm, const FsdpOptions& options);
  void install();

  at::Tensor take(size_t parameter, const at::Tensor& gradient);
  void inspect(Unit& unit);
  void make_resident(const std::vector<Unit*>& needed);
  void evict_for(const std::vector<Unit*>& needed);
  void prefetch(const PrefetchOrder& order);
  void release(Unit& unit);
  void release_all();
  void forget_current();
  void require_unchanged(const Unit& unit) const;

  void enter_backward();
  void end_backward();
  void fail_backward();
  void recover();  // from a backward that failed, before anything else
  void require_outside_backward(const char* call) const;

  void trace_compute(const std::vector<Unit*>& units);  // from now on, until the next call
  void trace_compute_ends();
  void describe_order(std::ostream& text, const char* pass, const PrefetchOrder& order) const;

  mutable std::recursive_mutex mutex_;
  ShardedModel model_;
  ShardedGradients gradients_;
  std::shared_ptr<BackwardPass> pass_;

  std::vector<Unit*> recent_;   // units that were used and are resident, the latest last
  std::vector<Unit*> current_;  // of the last operator that came here
  std::string computing_;       // their names, while they are being traced
  Trace::Clock::time_point computing_since_;
  PrefetchOrder forward_order_;
  PrefetchOrder backward_order_;
  std::vector<std::optional<uint32_t>> versions_;  // by unit: of its shards when forward recorded their use
  bool failed_ = false;                            // a backward, and what was under way has not been waited for
  bool first_backward_ = true;
  bool forward_is_new_ = true;  // no unit was used since the last backward
  bool sync_ = true;
  bool summoned_ = false;
  bool summoned_elsewhere_ = false;  // on rank 0 only, and this is another
};

}  // namespace tessera
