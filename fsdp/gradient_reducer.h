#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/fsdp/order_log.h"
#include "tessera/fsdp/sharding_groups.h"
#include "tessera/fsdp/unit.h"
#include "tessera/memory/buffer_pool.h"
#include "tessera/offload/copy_engine.h"

namespace tessera {

// What is looked at beyond the need, at a cost; see FsdpOptions.
struct ReducerChecks {
  bool uneven_use = false;
  bool finite = false;
};

// How reduced gradients leave the device; see CpuOffload.
struct GradientSink {
  CopyEngine* engine = nullptr;  // null: they stay
  BufferPool* staging = nullptr;
};

// Takes full gradients as autograd produces them, and leaves each rank with the average of its part.
//
// A unit's gradients are copied into one flat bucket; when the last of them has come, the bucket's
// reduce-scatter is started and goes on while backward computes. All ranks must start these in one
// order, whatever gradient came first on each: the reverse of the order in which forward used
// the units, to which a sequential model's backward corresponds. A unit that is complete waits for
// those before it; what is incomplete when backward ends (parameters that this rank did not use)
// is completed with zeros. Then the ranks tell each other, in one small all-gather, which
// parameters had a gradient at all, so that those without one anywhere keep none, and a
// fingerprint of everything that the wrapper exchanged since the last backward, which must be the
// same.
//
// Where the model is replicated, each reduced part is averaged with its counterparts in the other
// copies as soon as the reduce-scatter has ended. With offload it then travels to host memory, two of
// them at a time, while backward goes on.
//
// Used by one thread at a time.
class GradientReducer {
 public:
  GradientReducer(const ShardingGroups& groups, std::vector<std::unique_ptr<Unit>>& units, OrderLog& log,
                  ReducerChecks checks = {}, GradientSink sink = {});

  // Forward used this unit with autograd recording: backward will have gradients for it.
  void expect(Unit& unit);

  void begin_backward();
  // Adds a parameter's full gradient, of any layout; undefined means none. Returns whether the
  // unit's gradients are complete. `reduce` is false under no_sync: the bucket then waits for a
  // later backward.
  bool add(Unit& unit, size_t group, size_t parameter, const at::Tensor& gradient, bool reduce);
  // Ends backward: afterwards each shard has its gradient. Collective. Throws CommError,
  // std::invalid_argument if the ranks reduced different units, and, on all ranks, what the
  // checks find.
  void finish();
  // Ends a backward under no_sync: the buckets stay.
  void end_without_reducing();
  // Ends a backward that an exception has cut short; its gradients are lost.
  void abandon();

  // Called with the parameters of a group, this rank's shards, as soon as their gradients are final;
  // empty: nobody is. See GradientSource.
  using Observer = std::function<void(const std::vector<at::Tensor>& shards)>;
  void set_observer(Observer observer) { observer_ = std::move(observer); }
  bool has_observer() const { return observer_ != nullptr; }

  int64_t bucket_bytes() const { return pool_.lent_bytes(); }
  int64_t peak_bucket_bytes() const { return pool_.peak_lent_bytes(); }
  void reset_peak() { pool_.reset_peak(); }
  void trim() { pool_.trim(); }

 private:
  struct GroupState {
    at::Tensor bucket;           // [full_numel] or undefined
    std::vector<bool> filled;    // by parameter: the bucket has its gradient
    std::vector<bool> arrived;   // by parameter: its gradient came in this backward
    size_t first_parameter = 0;  // position in the usage bitmap
  };
  struct UnitState {
    std::vector<GroupState> groups;
    int64_t missing = 0;  // gradients to come in this backward
    bool expected = false;
    bool queued = false;  // has a place in queue_
    bool complete = false;
  };
  struct InFlight {
    Unit* unit;
    size_t group;
    at::Tensor bucket;
    at::Tensor reduced;  // where the gradient will be
    std::vector<bool> filled;
    Pending pending;
    at::Tensor staging;  // with offload: what the reduce-scatter fills, on the device
    Copy leaving;
  };
  struct Undecided {  // reduced, but perhaps some parameter was used by no rank
    Unit* unit;
    size_t group;
    at::Tensor reduced;
  };

  void enqueue(Unit& unit);
  void start_complete_ones();
  void start_reduce(Unit& unit);
  // Waits for the oldest reduce-scatter; `accept` makes its result the shards' gradient, after the
  // exchange with the other copies.
  void finish_oldest(bool accept = true);
  void finish_oldest_crossing(bool accept = true);
  void settle(InFlight flight);  // exchanged with everyone: to the host, or accepted
  void finish_oldest_leaving(bool accept = true);
  void accept(InFlight flight);
  void observe(const Unit& unit, size_t group, const std::vector<bool>& used) const;
  bool is_busy(const Unit& unit, size_t group) const;
  void check_uneven_use(const at::Tensor& table);
  void check_finite();
  at::Tensor own_report() const;
  void check_reports(const at::Tensor& reports);
  void reset_expectations();

  const ShardingGroups& groups_;
  OrderLog& log_;
  const ReducerChecks checks_;
  const GradientSink sink_;
  std::vector<std::unique_ptr<Unit>>& units_;
  BufferPool pool_;
  std::vector<UnitState> states_;           // by unit
  std::vector<int> first_uses_;             // units in order of their first use in forward
  std::vector<int> queue_;                  // units in the order in which they are reduced
  size_t started_ = 0;                      // how many of queue_ are
  std::vector<InFlight> in_flight_;         // oldest first
  std::vector<InFlight> crossing_;          // reduced in this copy; being averaged over copies, oldest first
  std::vector<InFlight> leaving_;           // averaged; on the way to the host, oldest first
  std::vector<std::vector<bool>> reduced_;  // by unit and group: in this backward
  std::vector<Undecided> undecided_;
  Observer observer_;
  std::vector<std::vector<bool>> announced_;  // by unit and group: reduced in this backward
  std::vector<bool> used_;                    // by parameter of all units: had a gradient here
};

}  // namespace tessera
