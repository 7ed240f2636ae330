#include "core/comm/gloo/gloo_operation.h"

#include <ATen/ops/empty.h>

#include <chrono>
#include <utility>

#include "core/comm/fingerprint.h"
#include "core/comm/gloo/gloo_communicator.h"

namespace tessera::internal {

using std::chrono::steady_clock;

GlooOperation::GlooOperation(std::shared_ptr<GlooCommunicator> comm, std::string description)
    : comm_(std::move(comm)),
      description_(std::move(description)),
      tag_{.sequence = comm_->sequence_++,
           .fingerprint = static_cast<uint32_t>(Fingerprint().add(description_).value())} {
  comm_->process_.require_this(description_);
  comm_->watch_.started(tag_.sequence, description_);
  comm_->in_flight_.add(resources_, description_ + " on rank " + std::to_string(comm_->rank()));
}

GlooOperation::~GlooOperation() { comm_->in_flight_.remove(resources_, comm_->process_.is_this()); }

void GlooOperation::send(const at::Tensor& tensor, int peer, size_t part) {
  start_message(tensor, peer, part, /*is_send=*/true);
  comm_->count_sent(static_cast<int64_t>(tensor.nbytes()));
}

at::Tensor GlooOperation::make_staging(int64_t numel, at::ScalarType dtype) {
  resources_.staging.push_back(at::empty({numel}, at::TensorOptions(at::kCPU).dtype(dtype)));
  return resources_.staging.back();
}

at::Tensor GlooOperation::receive_new(int64_t numel, at::ScalarType dtype, int peer, size_t part) {
  const at::Tensor room = make_staging(numel, dtype);
  receive(room, peer, part);
  return room;
}

void GlooOperation::start_message(const at::Tensor& tensor, int peer, size_t part, bool is_send) {
  if (tensor.numel() == 0) return;
  MessageTag tag = tag_;
  tag.part = part;
  try {
    comm_->transports_.to(peer).start(tensor, peer, is_send, tag, resources_.messages);
  } catch (const std::exception& error) {
    fail({peer, is_send, error.what()});
  }
}

void GlooOperation::start_collective(Transport& carrier, const Collective& collective) {
  if (const auto room = carrier.await_room()) wait_for_room(room);
  try {
    auto [message, sent_bytes] = carrier.start_collective(collective, tag_);
    if (message) resources_.messages.push_back(std::move(message));
    comm_->count_sent(sent_bytes);
  } catch (const std::exception& error) {
    fail({-1, /*is_send=*/true, error.what()});
  }
}

void GlooOperation::wait_for_room(const std::shared_ptr<TransportMessage>& room) {
  const auto began = steady_clock::now();
  deadline_ = RunClock::now() + comm_->timeout();
  // Passes no sequence number, because this wait is for room, not for the start of this operation by all ranks.
  comm_->watch_.begin_wait();
  const auto failure = wait_for(room);
  if (!failure) comm_->in_flight_.end_wait();
  comm_->watch_.end_wait();
  if (failure) fail(*failure);
  comm_->count_wait(steady_clock::now() - began, description_);
}

void GlooOperation::reduce_in_background(const std::vector<at::Tensor>& own, const at::Tensor& out, ReduceOp reduce,
                                         bool publish) {
  const auto start_chunk = [comm = comm_.get()](const at::Tensor& chunk, int peer, bool is_send,
                                                const MessageTag& tag) {
    TransportMessages started;  // one message, because a chunk is not split further
    comm->transports_.to(peer).start(chunk, peer, is_send, tag, started);
    return std::move(started.front());
  };
  // The functions hold a non-owning pointer to the communicator, which outlives its pipelines.
  ReductionPipeline::Exchange exchange;
  exchange.receive = [start_chunk, tag = tag_](const at::Tensor& chunk, int peer) {
    return start_chunk(chunk, peer, /*is_send=*/false, tag);
  };
  MessageTag publish_tag = tag_;
  ++publish_tag.step;
  if (publish)
    exchange.publish = [start_chunk, comm = comm_.get(), publish_tag](const at::Tensor& chunk, int peer) {
      comm->count_sent(static_cast<int64_t>(chunk.nbytes()));
      return start_chunk(chunk, peer, /*is_send=*/true, publish_tag);
    };
  resources_.pipeline =
      std::make_shared<ReductionPipeline>(comm_->rank(), comm_->size(), own, out, reduce, std::move(exchange));
  if (const auto failure = resources_.pipeline->announce()) fail(*failure);
}

void GlooOperation::start_pipeline() { comm_->pipelines_.add(resources_.pipeline); }

void GlooOperation::wait_for_pipeline() {
  const auto began = steady_clock::now();
  comm_->watch_.begin_wait(tag_.sequence);
  const auto failure = wait_for(*resources_.pipeline);
  comm_->watch_.end_wait();
  if (failure) fail(*failure);
  for (auto& message : PipelineThread::published(*resources_.pipeline))
    resources_.messages.push_back(std::move(message));
  comm_->count_wait(steady_clock::now() - began, description_);
}

std::optional<MessageFailure> GlooOperation::wait_for(const ReductionPipeline& pipeline) const {
  // A non-owning pointer, because the communicator outlives its watchdog.
  const std::shared_ptr<InterruptibleWait> wait(std::shared_ptr<void>(), &comm_->pipelines_);
  std::optional<MessageFailure> failure = MessageFailure{-1, false, ""};
  if (comm_->in_flight_.begin_wait(wait)) failure = comm_->pipelines_.wait(pipeline, deadline_);
  comm_->in_flight_.end_wait();
  return failure;
}

void GlooOperation::wait_for_messages() {
  TransportMessages& messages = resources_.messages;
  if (messages.empty()) return;
  const auto began = steady_clock::now();
  comm_->watch_.begin_wait(tag_.sequence);
  for (const auto& message : messages) {
    const auto failure = wait_for(message);
    if (!failure) continue;
    comm_->watch_.end_wait();
    fail(*failure);
  }
  comm_->in_flight_.end_wait();
  comm_->watch_.end_wait();
  messages.clear();
  comm_->count_wait(steady_clock::now() - began, description_);
}

// Returns exceptions, also std::bad_alloc, as failures, because the caller must end the watchdog's wait.
std::optional<MessageFailure> GlooOperation::wait_for(const std::shared_ptr<TransportMessage>& message) const {
  const auto failure = [&](std::string cause) {
    return MessageFailure{message->peer(), message->is_send(), std::move(cause)};
  };
  if (!comm_->in_flight_.begin_message_wait(message)) return failure("");
  try {
    return message->wait(deadline_);
  } catch (const std::exception& error) {
    return failure(error.what());
  }
}

void GlooOperation::fail(const MessageFailure& failure) const { comm_->fail(*this, failure); }

void GlooOperation::finish() {
  const GlooCommunicator::InCall call(*comm_, description_);
  deadline_ = RunClock::now() + comm_->timeout();
  if (resources_.is_aborted) fail({-1, false, ""});
  comm_->process_.require_this(description_);
  if (resources_.pipeline) wait_for_pipeline();
  wait_for_messages();
  if (complete) complete();
  resources_.staging.clear();
  resources_.pipeline.reset();
}

}  // namespace tessera::internal
