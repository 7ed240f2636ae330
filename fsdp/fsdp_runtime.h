#pragma once

#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/flat/memory_report.h"
#include "tessera/flat/model_shards.h"
#include "tessera/fsdp/full_parameters.h"
#include "tessera/fsdp/gradient_reducer.h"
#include "tessera/fsdp/options.h"
#include "tessera/fsdp/order_log.h"
#include "tessera/fsdp/sharding_groups.h"
#include "tessera/fsdp/unit.h"
#include "tessera/memory/buffer_pool.h"
#include "tessera/memory/pinned_pool.h"
#include "tessera/offload/copy_engine.h"
#include "tessera/paging/prefetch_order.h"
#include "tessera/paging/residency.h"
#include "tessera/trace/trace.h"

namespace tessera {

// Decides which units are resident when. Sole writer of the units' states.
//
// Driven by events: an operator is about to use parameters (use()), a gradient has been computed
// (gradient_arrived()), a backward has ended. From these it evicts, gathers, prefetches and
// reduces:
//
//   use(unit)   evict the least recently used units beyond keep_recent; gather the unit, unless a
//               prefetch did; then start gathering the units that followed it last time
//   gradient    hand it to the reducer; when it was its unit's last, release the unit
//   end         reduce what is left, release everything: the optimizer changes the shards next
//
// The autograd engine calls back from its own threads where a device has one, never at the same
// time as the user's thread runs; the mutex makes that hand-over safe.
class FsdpRuntime : public Pager, public std::enable_shared_from_this<FsdpRuntime> {
 public:
  // Plans units, checks that all ranks agree, and shards the module. Collective.
  static std::shared_ptr<FsdpRuntime> wrap(torch::nn::Module& module, std::shared_ptr<Communicator> comm,
                                           const FsdpOptions& options);

  void use(const std::vector<Page*>& pages) override;
  [[noreturn]] void refuse(const Page& page, const at::Tensor& view, const std::string& operation) override;

  void begin_forward();
  void observe_gradients(GradientReducer::Observer observer);
  void set_sync(bool sync);
  bool sync() const { return sync_; }
  void summon(const SummonOptions& options);
  void dismiss(bool writeback);

  const std::vector<NamedShard>& named_shards() const { return named_shards_; }
  torch::OrderedDict<std::string, at::Tensor> named_buffers() const;
  double clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite);
  using VisitState =
      std::function<void(const std::string& name, const std::vector<std::string>& aliases, const at::Tensor& tensor)>;
  void visit_full_state(const VisitState& visit, const StateDictOptions& options);
  torch::OrderedDict<std::string, at::Tensor> full_state_dict(const StateDictOptions& options);
  MemoryReport memory() const;
  void reset_peak_memory();
  std::string describe() const;
  const std::shared_ptr<Communicator>& comm() const { return groups_.world; }
  const MixedPrecision& precision() const { return options_.mixed_precision; }

 private:
  FsdpRuntime(torch::nn::Module& module, std::shared_ptr<Communicator> comm, const FsdpOptions& options);
  void check_agreement(const std::vector<PlannedUnit>& plan) const;
  void make_units(std::vector<PlannedUnit>& plan);
  FlatGroupOptions::Memory host_memory(const char* purpose);
  FlatGroupOptions::Memory shard_memory(const std::string& unit);
  void cast_buffers();
  void name_shards();
  void install_hooks(Unit& unit);

  void gradient_arrived(int unit, size_t group, size_t parameter, const at::Tensor& gradient);
  void make_resident(const std::vector<Unit*>& needed);
  void evict_for(const std::vector<Unit*>& needed);
  void prefetch(const PrefetchOrder& order);
  void release(Unit& unit);
  void release_all();

  std::string unit_names() const;
  void describe_order(std::ostream& text, const char* pass, const PrefetchOrder& order) const;
  void trace_compute(const std::vector<Unit*>& units);  // from now on, until the next call
  void trace_compute_ends();
  void enter_backward();
  void end_backward();
  void abandon_backward();
  void require_outside_backward(const char* call) const;

  mutable std::mutex mutex_;
  const FsdpOptions options_;
  const ShardingGroups groups_;
  const std::shared_ptr<torch::nn::Module> module_;
  BufferPool gathered_;
  BufferPool staging_;                  // with offload: shards and reduced gradients on their way
  PinnedPool host_;                     // with offload: where they lie
  std::unique_ptr<DiskPager> disk_;     // null without a directory
  std::unique_ptr<CopyEngine> copies_;  // null without offload
  OrderLog log_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::unique_ptr<GradientReducer> reducer_;
  std::vector<NamedShard> named_shards_;
  std::map<std::string, at::ScalarType> cast_buffers_;  // their dtype before, by name

  std::vector<Unit*> recent_;   // units that were used and are resident, the latest last
  std::vector<Unit*> current_;  // of the last operator that came here
  std::string computing_;       // their names, while they are being traced
  Trace::Clock::time_point computing_since_;
  PrefetchOrder forward_order_;
  PrefetchOrder backward_order_;
  bool in_backward_ = false;
  bool first_backward_ = true;
  bool forward_is_new_ = true;  // no unit was used since the last backward
  bool sync_ = true;
  bool summoned_ = false;
  bool summoned_elsewhere_ = false;  // on rank 0 only, and this is another
};

}  // namespace tessera
