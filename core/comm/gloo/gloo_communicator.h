#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/communicator.h>
#include "core/comm/backends.h"
#include "core/comm/gloo/gloo_operation.h"
#include "core/comm/gloo/gloo_transports.h"
#include "core/comm/gloo/operations_in_flight.h"
#include "core/comm/gloo/reduction_pipeline.h"
#include "core/comm/group_process.h"
#include "core/comm/single_thread_checker.h"
#include "core/comm/store_mailbox.h"
#include "core/comm/watchdog/watchdog.h"

namespace tessera::internal {

// A group over gloo. Of gloo's own collectives, only the all-reduce is used (backend_all_reduce()). The others are
// slow: gloo's reduce-scatter all-reduces a clone of its input, and its all-gather is a ring of copies. Other
// operations consist of sends and receives between pairs of ranks, directly from and to the caller's tensors.
// Reductions add in rank order in wait(). If no peers share memory, large reductions add chunk by chunk as data arrives
// (ReductionPipeline). If all ranks share memory, each small gather or reduction is one round of SharedRounds.
//
// The tag of each message combines the operation's number with a hash of its description. If ranks start different
// operations, the tags differ: the ranks stall instead of exchanging wrong data, and Watchdog reports the cause.
class GlooCommunicator : public Communicator, public HasStore, public std::enable_shared_from_this<GlooCommunicator> {
 public:
  GlooCommunicator(GlooTransports transports, c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                   GlooOptions options, WaitRegistry::Place place = {});
  ~GlooCommunicator() override;

  const c10::intrusive_ptr<c10d::Store>& store() const override { return store_; }
  int ended_rank() const override { return transports_.ended_rank(); }

  bool is_lazy(int64_t full_numel) const override { return transports_.are_lazy(full_numel); }
  bool takes_pieces() const override { return true; }
  void abort_this(const std::string& reason) noexcept override;

 protected:
  std::shared_ptr<Communicator> make_part(const std::string& name, const std::vector<int>& members,
                                          int position) override;
  Pending start(Collective collective) override;

 private:
  friend class GlooOperation;

  // Marks a call of the rank's thread, and refuses calls of a second thread. During a call, no other thread closes the
  // group. If another thread breaks the group meanwhile, the end of the outermost call closes the group.
  class InCall {
   public:
    InCall(GlooCommunicator& comm, const std::string& what);
    ~InCall();
    InCall(const InCall&) = delete;
    InCall& operator=(const InCall&) = delete;

   private:
    GlooCommunicator& comm_;
    std::optional<SingleThreadChecker::Call> call_;
  };
  void close_if_broken() noexcept;

  template <class Connect>
  auto meet(const GlooOperation& op, const std::string& prefix, Connect connect);
  void make_connections(const GlooOperation& op);

  [[noreturn]] void fail(const GlooOperation& op, const MessageFailure& failure);

  const GroupProcess process_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const GlooOptions options_;
  GlooTransports transports_;
  OperationsInFlight in_flight_;
  uint64_t sequence_ = 0;  // number of the next operation
  PipelineThread pipelines_;
  Watchdog watch_;
};

}  // namespace tessera::internal
