#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/communicator.h>
#include "core/comm/gloo/operations_in_flight.h"
#include "core/comm/gloo/reduction_pipeline.h"
#include "core/comm/gloo/transport.h"

namespace tessera::internal {

class GlooCommunicator;

// A collective operation in flight. An operation has one or more steps. Its messages belong to the current step.
class GlooOperation : public Pending::Operation {
 public:
  GlooOperation(std::shared_ptr<GlooCommunicator> comm, std::string description);
  ~GlooOperation() override;

  // `part` numbers the messages of one step to one peer. Sender and receiver must pass the same number.
  void send(const at::Tensor& tensor, int peer, size_t part = 0);
  void receive(const at::Tensor& tensor, int peer, size_t part = 0) {
    start_message(tensor, peer, part, /*is_send=*/false);
  }
  // make_staging() allocates a tensor of shape [numel] that lives until the operation ends. receive_new() allocates
  // such a tensor and receives into it.
  at::Tensor make_staging(int64_t numel, at::ScalarType dtype);
  at::Tensor receive_new(int64_t numel, at::ScalarType dtype, int peer, size_t part = 0);
  // Blocks until `carrier` has room for the operation, and then starts the whole operation on `carrier`.
  void start_collective(Transport& carrier, const Collective& collective);
  // Prepares a reduction of `own` and of the parts received in this step into `out`. start_pipeline() starts it on the
  // pipeline thread. If `publish` is true, sends each sum to all other ranks in the next step.
  void reduce_in_background(const std::vector<at::Tensor>& own, const at::Tensor& out, ReduceOp reduce, bool publish);
  void start_pipeline();
  void wait_for_messages();
  void next_step() { ++tag_.step; }
  void finish() override;

  std::function<void()> complete;  // if set, finish() calls it when the messages of the first step are complete
  const std::string& description() const { return description_; }
  uint64_t sequence() const { return tag_.sequence; }

 private:
  void start_message(const at::Tensor& tensor, int peer, size_t part, bool is_send);
  void wait_for_room(const std::shared_ptr<TransportMessage>& room);
  std::optional<MessageFailure> wait_for(const std::shared_ptr<TransportMessage>& message) const;
  std::optional<MessageFailure> wait_for(const ReductionPipeline& pipeline) const;
  void wait_for_pipeline();
  [[noreturn]] void fail(const MessageFailure& failure) const;

  const std::shared_ptr<GlooCommunicator> comm_;
  const std::string description_;
  MessageTag tag_;                       // tag of the current step
  TransportMessage::Deadline deadline_;  // deadline of the waits; set by finish() and wait_for_room()
  OperationResources resources_;
};

}  // namespace tessera::internal
