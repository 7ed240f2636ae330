#pragma once

#include <memory>
#include <string>
#include <vector>

#include <tessera/communicator.h>
#include "core/gradients/collective_log.h"
#include "core/memory/counted_buffers.h"
#include "core/paging/residency.h"
#include "core/runtime/copy_engine.h"
#include "core/runtime/stream_uses.h"
#include "fsdp/flat_parameter.h"
#include "fsdp/paged_flat_parameter.h"

namespace tessera::internal {

// Where a unit's shards come from when they lie in host memory.
struct ShardSource {
  CopyEngine* engine = nullptr;  // null: shards are on the device
  CountedBuffers* staging = nullptr;
};

// Who keeps what forward has gathered, and in what memory (see HybridSharding::ranks_per_secondary_copy).
struct SecondaryCopy {
  Communicator* comm = nullptr;  // null: nobody does
  CountedBuffers* memory = nullptr;
};

// What is gathered, used and released together: the parameters of one wrapped module.
//
//   kSharded    holds 1/N of the parameters
//   kFetching   with offload only: and 1/N on the device, which a copy from the host is filling
//   kGathering  and a full buffer, which an all-gather is filling
//   kResident   and a full buffer, which the module's parameters are views of
//
// In a world of one, unless parameters are cast for use or lie in host memory, the shard is the full buffer: the unit
// is always resident and costs nothing. Used by one thread at a time; who calls what when is the Scheduler's business.
class Unit {
 public:
  enum class State { kSharded, kFetching, kGathering, kResident };

  // Takes the values of the planned parameters and turns the module's own into views of pages.
  // Collective if `sync_module_states`.
  Unit(int index, const PlannedUnit& plan, Communicator& comm, const FlatParameterOptions& options,
       CountedBuffers& buffers, CollectiveLog& log, bool sync_module_states, ShardSource source = {},
       SecondaryCopy secondary = {});
  ~Unit();
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  int index() const { return index_; }
  const std::string& name() const { return name_; }            // "unit 'blocks.3'"
  const std::string& plan_name() const { return plan_name_; }  // "blocks.3"
  State state() const { return state_; }
  using FlatParameters = std::vector<std::unique_ptr<PagedFlatParameter>>;
  FlatParameters& flat_parameters() { return flat_parameters_; }
  const FlatParameters& flat_parameters() const { return flat_parameters_; }
  // Throws std::logic_error, naming the parameter, unless `operation`, which writes to a view of `page` that nobody may
  // write to, leaves the page alone. `rank` is for errors.
  void require_write(const Page& page, const at::Tensor& view, const std::string& operation,
                     const std::string& rank) const;
  // Throws std::logic_error for a page of a resident unit that is not what its parameters are views of: someone has
  // kept a view from when it was. `rank` is for errors.
  void require_attached(const Page& page, const std::string& rank) const;
  int64_t full_bytes() const;

  void read_ahead();                // starts reading what lies on a disk; not collective
  void start_fetch();               // kSharded -> kFetching with offload, else nothing; not collective
  void start_gather();              // kSharded or kFetching -> kGathering; collective
  bool may_gather_ahead() const;    // whether anything travels before finish_gather()
  void finish_gather();             // kGathering -> kResident; waits
  void use_here() { uses_.use(); }  // of a resident one: the current stream waits for the gather, too
  void release();                   // any -> kSharded; waits for a copy or gather under way. Not for a pinned unit.

  // From now on a part of what is gathered is kept for the secondary copy when the unit is released.
  void keep_secondary() { keeps_secondary_ = secondary_.comm != nullptr; }
  void drop_secondary();  // nothing is kept, and what was goes

  // Before shards in host memory are written to: waits until no copy reads them any more.
  void wait_for_reads();
  // Whether the shards were written to since they were gathered.
  bool is_stale() const;
  // What autograd counts of the shards' changes, to compare what forward and backward see of them.
  uint32_t version() const;
  void set_current(Page::GradMode use);

  // A pinned unit stays resident, in the parameters' own dtype, and may be written to by operators; its shards may not.
  // `on_host`: in host memory, whatever the device. Collective. Unpinning with `writeback` copies this rank's part of
  // the full parameters into the shards, without it what operators have written is lost; release() follows.
  void pin(bool writeback, bool on_host);
  // Takes part in the other ranks' pin() without keeping what is gathered.
  void help_to_pin();
  void unpin(bool writeback);
  // What unpinning with `writeback` copies, for who reads the shards now. Without it throws std::logic_error if
  // anything was written. Not collective.
  void write_back();
  bool is_pinned() const { return is_pinned_; }

  // Full parameters in their own dtype: the unit's own while it is pinned, else gathered, in memory of the caller's.
  // Collective.
  at::Tensor full_values(const PagedFlatParameter& paged);

  // Finds parameters that the user has given other data (torch::load(), set_data(), vector_to_parameters()) since the
  // last look: takes their values, this rank's part of them, and points them back. Throws std::logic_error, naming the
  // parameter, for what is not of its shape, or of another dtype (module.to()), or if `may_change` is false. The same
  // for the shards, in which users and optimizers have the parameters.
  void bring_home(bool may_change);

 private:
  void return_staging();
  // "parameter 'fc.weight'", of which `view` is a view of `page`; and whether a page is that of a shard.
  std::string parameter_at(const Page& page, const at::Tensor& view) const;
  bool is_shard_page(const Page& page) const;
  bool has_secondary() const;
  void gather_secondary();
  void cut_secondary();
  // Of a pinned unit: whether what its parameters are views of is the shard; and its part of what they are.
  void copy_own_part(const PagedFlatParameter& paged, const at::Tensor& shard) const;
  bool is_shard_itself(const Page& page, const PagedFlatParameter& paged) const {
    return is_whole_ && &page != paged.host_page.get();
  }

  const int index_;
  const std::string name_;
  const std::string plan_name_;
  Communicator& comm_;
  CountedBuffers& memory_;
  CollectiveLog& log_;
  const ShardSource source_;
  const SecondaryCopy secondary_;
  bool keeps_secondary_ = false;
  bool is_whole_ = false;  // a world of one, nothing cast, on the device
  State state_ = State::kSharded;
  bool is_pinned_ = false;
  bool loses_writes_ = false;  // when it is unpinned
  FlatParameters flat_parameters_;
  std::vector<at::Tensor> buffers_;  // one a flat parameter, while gathering or resident
  StreamUses uses_;                  // of the buffers
  std::vector<at::Tensor> saved_;    // one each, of a pinned unit that is whole and whose changes will be lost
};

}  // namespace tessera::internal
