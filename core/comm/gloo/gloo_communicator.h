#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include <tessera/communicator.h>
#include "core/comm/backends.h"
#include "core/comm/gloo/gloo_operation.h"
#include "core/comm/gloo/reduction_pipeline.h"
#include "core/comm/group_process.h"
#include "core/comm/interruptible_store.h"
#include "core/comm/notes.h"
#include "core/comm/shared_memory/peer_memory.h"
#include "core/comm/shared_memory/shared_rounds.h"
#include "core/comm/watchdog/stall_watch.h"

namespace tessera::internal {

// By which the ranks of a group reach each other.
struct GlooTransports {
  std::unique_ptr<PeerMemory> memory;
  c10::intrusive_ptr<c10d::Backend> group;
};

// gloo's own reduce-scatter clones its input, all-reduces the clone and keeps a part, and its all-gather is a ring of
// copies. Here every operation is a set of sends and receives between pairs of ranks, all at once, straight out of and
// into the caller's tensors; sums are taken in rank order: when the operation is waited for where ranks of one host
// read and write each other's memory (PeerMemory), else chunk by chunk as gloo's TCP brings them (ReductionPipeline).
// What is small, where all ranks share memory, is no messages but one SharedRounds.
// Each message carries a tag made of the operation's number and a hash of what it is for, so that ranks which have
// diverged never mix up data: they stall, and StallWatch says why.
class GlooCommunicator : public Communicator, public HasStore, public std::enable_shared_from_this<GlooCommunicator> {
 public:
  GlooCommunicator(c10::intrusive_ptr<c10d::Backend> group, std::unique_ptr<PeerMemory> memory,
                   c10::intrusive_ptr<c10d::Store> store, int rank, int size, GlooOptions options,
                   RankWaits::Place place = {});
  ~GlooCommunicator() override;

  const c10::intrusive_ptr<c10d::Store>& store() const override { return store_; }
  int ended_rank() const override;

  bool moves_only_when_awaited(int64_t full_numel) const override {
    return rounds_ != nullptr && full_numel > rounds_->plan().most_numel();
  }
  void abort_this(const std::string& reason) noexcept override;

 protected:
  std::shared_ptr<Communicator> make_part(const std::string& name, const std::vector<int>& members,
                                          int position) override;
  Pending start(Collective collective) override;
  bool takes_pieces() const override { return true; }

 private:
  friend class GlooOperation;

  // A thread's call. Nothing is closed meanwhile: where another one breaks the group, this one closes it as it leaves.
  class InCall {
   public:
    InCall(GlooCommunicator& comm, const std::string& what);
    ~InCall();
    InCall(const InCall&) = delete;
    InCall& operator=(const InCall&) = delete;

   private:
    GlooCommunicator& comm_;
    std::optional<OneCaller::Call> call_;
  };
  void close_if_broken() noexcept;

  template <class Connect>
  auto meet(const GlooOperation& op, const std::string& prefix, Connect connect);
  void make_connections(const GlooOperation& op);

  bool fits_in_a_round(const Collective& collective) const;
  void gather_in_a_round(GlooOperation& op, const Collective& collective);
  void reduce_in_a_round(GlooOperation& op, const Collective& collective);
  int64_t bytes_sent_to_reduce(const Collective& collective) const;
  bool spreads_by_doubling(const at::Tensor& tensor, ReduceOp reduce) const;
  void reduce_scatter(GlooOperation& op, const std::vector<at::Tensor>& pieces, const at::Tensor& shard,
                      const std::vector<int64_t>& counts, ReduceOp reduce);
  void all_reduce(GlooOperation& op, const at::Tensor& tensor, ReduceOp reduce);
  void reduce_by_doubling(GlooOperation& op, const at::Tensor& tensor, ReduceOp reduce);
  void reduce_to_root(GlooOperation& op, const at::Tensor& tensor, ReduceOp reduce, int root);
  void broadcast(GlooOperation& op, const at::Tensor& tensor, int root);

  // Messages of the parts of an operation; `op` outlives them.
  template <class Send, class Receive>
  void exchange(Send send, Receive receive);
  void exchange_shards(GlooOperation& op, const at::Tensor& full, const at::Tensor& shard,
                       const std::vector<int64_t>& counts);
  using Segments = std::vector<std::vector<at::Tensor>>;
  Segments exchange_parts(GlooOperation& op, const Segments& parts);
  void send_parts(GlooOperation& op, const std::vector<at::Tensor>& parts, const at::Tensor& own, int root);

  bool reduces_in_background(const at::Tensor& tensor) const;

  c10::intrusive_ptr<c10d::Work> post(const at::Tensor& tensor, int peer, bool is_send, int tag);
  std::optional<MessageFailure> wait_for(const ReductionPipeline& pipeline, PipelineThread::Deadline until);
  std::string closed_connection();
  void interrupt_locked();
  void break_and_interrupt(const std::string& reason);
  void close_locked() noexcept;
  c10::intrusive_ptr<c10d::Backend> connections();
  bool begin_wait_for(const GlooMessage& message);
  void end_waits();
  [[noreturn]] void fail(const GlooOperation& op, int peer, bool is_send, const std::string& cause);

  const GroupProcess process_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const GlooOptions options_;
  const std::unique_ptr<PeerMemory> memory_;    // null: no other rank on this host, or none that can be reached
  const std::unique_ptr<SharedRounds> rounds_;  // null: not all ranks
  std::mutex mutex_;                            // guards the next ten
  c10::intrusive_ptr<c10d::Backend> group_;     // null until it is needed, and once this is closed
  bool is_closed_ = false;
  std::optional<std::string> broken_;
  std::unordered_set<GlooOperation*> operations_;
  const GlooMessage* waits_for_ = nullptr;  // of an operation that is under way
  bool waits_for_pipeline_ = false;
  c10::intrusive_ptr<InterruptibleStore> meets_in_;  // with those that it is being connected to
  std::vector<GlooMessage> orphans_;                 // of operations that were dropped, with their tensors
  std::vector<at::Tensor> orphan_staging_;
  std::vector<std::shared_ptr<ReductionPipeline>> orphan_pipelines_;
  std::mutex posting_;  // of messages: c10d's group is for one thread at a time

  uint64_t sequence_ = 0;
  PipelineThread pipelines_;
  StallWatch watch_;
};

}  // namespace tessera::internal
