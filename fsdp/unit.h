#pragma once

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/flat/flat_group.h"
#include "tessera/fsdp/order_log.h"
#include "tessera/memory/buffer_pool.h"
#include "tessera/offload/copy_engine.h"
#include "tessera/paging/disk_pager.h"
#include "tessera/paging/residency.h"

namespace tessera {

// A flat group whose parameters are paged: the module's parameters are views of `page`.
struct PagedGroup {
  FlatGroup flat;
  std::unique_ptr<Page> page;
  // Where parameters are cast for use: what the module's parameters are views of while the unit is
  // pinned, in their own dtype. Else null.
  std::unique_ptr<Page> exact_page;
  // Stands in for the `.grad` of the module's own parameters, whose gradients are in the shards:
  // whoever computes with it (an optimizer built before wrapping, say) gets an error.
  std::unique_ptr<Page> grad_page;
  std::vector<at::Tensor> grad_guards;
  // By parameter, what carries its gradient hook; null while it is frozen. autograd itself holds
  // these nodes only weakly.
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators;
  // Of a shard in host memory: the part of it on the device, while it comes there and is gathered.
  at::Tensor staging;  // [layout().shard_numel()] of gather_dtype()
  Copy fetching;
  DiskPager::Hold held;  // of a shard on the disk, while it is copied
  Pending gathering;
};

// Where a unit's shards come from when they lie in host memory.
struct ShardSource {
  CopyEngine* engine = nullptr;  // null: shards are on the device
  BufferPool* staging = nullptr;
};

// What is gathered, used and released together: the parameters of one wrapped module.
//
//   kSharded    holds 1/N of the parameters
//   kFetching   with offload only: and 1/N on the device, which a copy from the host is filling
//   kGathering  and a full buffer, which an all-gather is filling
//   kResident   and a full buffer, which the module's parameters are views of
//
// In a world of one, unless parameters are cast for use or lie in host memory, the shard is the full buffer: the unit
// is always resident and costs nothing. Used by one thread at a time; who calls what when is FsdpRuntime's business.
class Unit {
 public:
  enum class State { kSharded, kFetching, kGathering, kResident };

  // Takes the values of the planned parameters and turns the module's own into views of pages.
  // Collective if `sync`.
  Unit(int index, const PlannedUnit& plan, Communicator& comm, const FlatGroupOptions& options, BufferPool& pool,
       Pager* pager, OrderLog& log, bool sync, ShardSource source = {});
  ~Unit();
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  int index() const { return index_; }
  const std::string& name() const { return name_; }            // "unit 'blocks.3'"
  const std::string& plan_name() const { return plan_name_; }  // "blocks.3"
  State state() const { return state_; }
  std::vector<std::unique_ptr<PagedGroup>>& groups() { return groups_; }
  const std::vector<std::unique_ptr<PagedGroup>>& groups() const { return groups_; }
  int64_t full_bytes() const;
  int64_t trainable_count() const;  // parameters that require a gradient now

  void read_ahead();     // starts reading what lies on a disk; not collective
  void start_fetch();    // kSharded -> kFetching with offload, else nothing; not collective
  void start_gather();   // kSharded or kFetching -> kGathering; collective
  void finish_gather();  // kGathering -> kResident; waits
  void release();        // any -> kSharded; waits for a copy or gather under way. Not for a pinned unit.

  // Whether the shards were written to since they were gathered.
  bool is_stale() const;
  void set_current(Page::Use use);

  // A pinned unit stays resident, in the parameters' own dtype, and may be written to by operators;
  // collective. Unpinning with `writeback` copies this rank's part of the full parameters into the
  // shards; release() follows.
  void pin();
  // Takes part in the other ranks' pin() without keeping what is gathered.
  void help_to_pin();
  void unpin(bool writeback);
  bool is_pinned() const { return is_pinned_; }

  // Looks for what the user did to the module's parameters since the last look: throws
  // std::logic_error if one was replaced; clears the gradients of shards whose parameter's was
  // cleared (module->zero_grad()); and returns whether one that requires a gradient has no hook.
  bool inspect_parameters();

 private:
  void adopt(PagedGroup& group);
  void return_staging();
  void point_parameters(PagedGroup& group, const Page& page, at::ScalarType dtype);
  static Page& page_in_use(PagedGroup& group) {
    return group.exact_page && group.exact_page->is_lent() ? *group.exact_page : *group.page;
  }

  const int index_;
  const std::string name_;
  const std::string plan_name_;
  Communicator& comm_;
  BufferPool& pool_;
  OrderLog& log_;
  const ShardSource source_;
  bool is_whole_ = false;  // a world of one, nothing cast, on the device
  State state_ = State::kSharded;
  bool is_pinned_ = false;
  std::vector<std::unique_ptr<PagedGroup>> groups_;
  std::vector<at::Tensor> buffers_;  // from the pool, one a group, while gathering or resident
};

}  // namespace tessera
