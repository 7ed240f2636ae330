#include "core/comm/gloo/gloo_operation.h"

#include <c10/util/StringUtil.h>

#include <iterator>
#include <mutex>

#include "core/comm/fingerprint.h"
#include "core/comm/gloo/gloo_communicator.h"
#include "core/comm/gloo/gloo_connections.h"

namespace tessera::internal {
namespace {

using std::chrono::steady_clock;

// What PeerMemory's outcomes, in their order, say of an operation that failed; "" where the watch knows more.
constexpr const char* kCauses[] = {
    "", "", "timed out", "it has left the group", "its process is gone", "it has another number of bytes for it"};

}  // namespace

void keep_memory(const std::vector<GlooMessage>& messages, std::vector<at::Tensor>& keeper) {
  for (const GlooMessage& message : messages)
    if (message.announced) keeper.push_back(message.tensor);
}

GlooOperation::GlooOperation(std::shared_ptr<GlooCommunicator> comm, std::string description)
    : comm_(std::move(comm)),
      description_(std::move(description)),
      fingerprint_(static_cast<uint32_t>(Fingerprint().add(description_).value())),
      sequence_(comm_->sequence_++) {
  comm_->process_.require_this(description_);
  comm_->watch_.started(sequence_, description_);
  std::lock_guard lock(comm_->mutex_);
  if (comm_->broken_) throw CommError(c10::str(description_, " on rank ", comm_->rank(), ": ", *comm_->broken_));
  comm_->operations_.insert(this);
}

GlooOperation::~GlooOperation() {
  std::lock_guard lock(comm_->mutex_);
  if (round_) {  // nobody counts on anything: what this rank contributes lies in its slot
    messages_.clear();
    if (comm_->process_.is_this()) comm_->rounds_->drop(*round_);
  }
  comm_->operations_.erase(this);
  // Never waited for: the peers still count on the messages, so they and their tensors live on.
  if (!comm_->is_closed_) copy_what_is_matched();
  if (!comm_->is_closed_ && !messages_.empty()) {
    std::move(messages_.begin(), messages_.end(), std::back_inserter(comm_->orphans_));
    std::move(staging_.begin(), staging_.end(), std::back_inserter(comm_->orphan_staging_));
  }
  if (!comm_->is_closed_ && pipeline_) comm_->orphan_pipelines_.push_back(std::move(pipeline_));
}

// This rank may be about to leave, and these messages with it.
void GlooOperation::copy_what_is_matched() noexcept {
  if (!comm_->process_.is_this()) return;
  std::erase_if(messages_, [this](const GlooMessage& message) {
    if (!message.announced) return false;
    try {
      comm_->memory_->copy_if_matched(message.announced);
    } catch (const PeerMemory::Unreachable&) {  // which the next that waits finds out, too
    }
    return message.announced->slot == nullptr;
  });
}

// 14 bits of number keep operations apart that are in flight together, 2 of step, 14 of hash, and the last says which
// way: see [Note: one way].
int GlooOperation::tag(int peer, bool is_send, int step) const {
  return static_cast<int>((sequence_ & 0x3fff) << 17 | (step & 0x3) << 15 | (fingerprint_ & 0x3fff) << 1) |
         connection_bit(comm_->rank(), peer, is_send);
}

// In memory messages are found by their tags alone, in any order: of two parts of an operation these differ, since the
// factor is odd.
uint64_t GlooOperation::memory_tag(size_t part) const {
  const uint32_t of_part = fingerprint_ + static_cast<uint32_t>(part) * 0x9e3779b9U;
  return sequence_ << 34 | static_cast<uint64_t>(step_) << 32 | of_part;
}

void GlooOperation::send(const at::Tensor& tensor, int peer, size_t part) {
  start_message(tensor, peer, part, /*is_send=*/true);
  comm_->count_sent(static_cast<int64_t>(tensor.nbytes()));
}

at::Tensor GlooOperation::make_staging(int64_t numel, at::ScalarType dtype) {
  staging_.push_back(at::empty({numel}, at::TensorOptions(at::kCPU).dtype(dtype)));
  return staging_.back();
}

at::Tensor GlooOperation::receive_new(int64_t numel, at::ScalarType dtype, int peer, size_t part) {
  const at::Tensor room = make_staging(numel, dtype);
  receive(room, peer, part);
  return room;
}

void GlooOperation::start_message(const at::Tensor& tensor, int peer, size_t part, bool is_send) {
  if (tensor.numel() == 0) return;
  try {
    if (PeerMemory* memory = comm_->memory_.get(); memory != nullptr && memory->reaches(peer)) {
      auto announced =
          is_send ? memory->send(tensor, peer, memory_tag(part)) : memory->receive(tensor, peer, memory_tag(part));
      if (announced) messages_.push_back({nullptr, std::move(announced), tensor, peer, is_send});
      return;
    }
    for (const at::Tensor& chunk : chunks_of(tensor))
      messages_.push_back({comm_->post(chunk, peer, is_send, tag(peer, is_send, step_)), nullptr, {}, peer, is_send});
  } catch (const std::exception& error) {
    comm_->fail(*this, peer, is_send, error.what());
  }
}

void GlooOperation::all_reduce_by_gloo(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  std::vector<at::Tensor> tensors{tensor};
  // c10d's FlightRecorder, one for the process, notes a group's first collective in a map before it takes its lock
  // (recordWithResetEnabled, in FlightRecorderDetail.hpp): ranks that are threads would do so at once.
  static std::mutex recording;
  comm_->make_connections(*this);
  try {
    const auto group = comm_->connections();
    std::lock_guard lock(recording);
    messages_.push_back({group->allreduce(tensors), nullptr, {}, -1, true});
  } catch (const std::exception& error) {
    comm_->fail(*this, -1, true, error.what());
  }
  comm_->count_sent(2 * static_cast<int64_t>(tensor.nbytes()) * (comm_->size() - 1) / comm_->size());
}

void GlooOperation::begin_round(const SharedRounds::Contribution& own, std::vector<uint64_t> expected,
                                std::function<void(const SharedRounds::Contributions&)> read) {
  if (!comm_->rounds_->has_room()) wait_for_room();
  const bool is_read = read != nullptr;
  round_ = comm_->rounds_->begin(memory_tag(), own, std::move(expected), std::move(read));
  if (is_read) messages_.push_back({nullptr, nullptr, {}, -1, /*is_send=*/false});
}

// This rank is many rounds ahead of another one.
void GlooOperation::wait_for_room() {
  GlooMessage room{nullptr, nullptr, {}, -1, /*is_send=*/false};
  const auto began = steady_clock::now();
  comm_->watch_.begin_wait();  // for one that has started less than this operation, maybe long ago
  auto outcome = PeerMemory::Outcome::kInterrupted;
  if (comm_->begin_wait_for(room)) outcome = comm_->rounds_->make_room(began + comm_->timeout(), room.peer);
  if (outcome == PeerMemory::Outcome::kDone) comm_->end_waits();
  comm_->watch_.end_wait();
  if (outcome != PeerMemory::Outcome::kDone)
    comm_->fail(*this, room.peer, room.is_send, kCauses[static_cast<size_t>(outcome)]);
  comm_->count_wait(steady_clock::now() - began, description_);
}

void GlooOperation::reduce_in_background(const std::vector<at::Tensor>& own, const at::Tensor& out, ReduceOp reduce,
                                         bool publish) {
  // Tags are of the step, so they are made here; the communicator outlives its pipelines.
  std::vector<int> receive_tags, publish_tags;
  for (int peer = 0; peer < comm_->size(); ++peer) {
    receive_tags.push_back(tag(peer, /*is_send=*/false, step_));
    publish_tags.push_back(tag(peer, /*is_send=*/true, step_ + 1));
  }
  ReductionPipeline::Transport transport;
  transport.receive = [comm = comm_.get(), tags = std::move(receive_tags)](const at::Tensor& chunk, int peer) {
    return comm->post(chunk, peer, /*is_send=*/false, tags[peer]);
  };
  if (publish)
    transport.publish = [comm = comm_.get(), tags = std::move(publish_tags)](const at::Tensor& chunk, int peer) {
      comm->count_sent(static_cast<int64_t>(chunk.nbytes()));
      return comm->post(chunk, peer, /*is_send=*/true, tags[peer]);
    };
  pipeline_ = std::make_shared<ReductionPipeline>(comm_->rank(), comm_->size(), own, out, reduce, std::move(transport));
  if (const auto failure = pipeline_->announce()) comm_->fail(*this, failure->peer, failure->is_send, failure->cause);
}

void GlooOperation::start_pipeline() { comm_->pipelines_.add(pipeline_); }

void GlooOperation::wait_for_pipeline() {
  const auto began = steady_clock::now();
  comm_->watch_.begin_wait(sequence_);
  auto failure = comm_->wait_for(*pipeline_, deadline_);
  comm_->watch_.end_wait();
  if (failure) comm_->fail(*this, failure->peer, failure->is_send, failure->cause);
  for (auto& [work, peer] : PipelineThread::published(*pipeline_))
    messages_.push_back({std::move(work), nullptr, {}, peer, /*is_send=*/true});
  comm_->count_wait(steady_clock::now() - began, description_);
}

void GlooOperation::wait_for_messages() {
  if (messages_.empty()) return;
  const auto began = steady_clock::now();
  comm_->watch_.begin_wait(sequence_);
  for (GlooMessage& message : messages_) {
    std::string cause;
    if (comm_->begin_wait_for(message) && wait_for(message, &cause)) continue;
    comm_->watch_.end_wait();
    comm_->fail(*this, message.peer, message.is_send, cause);  // clears messages_, so the loop ends here
  }
  comm_->end_waits();
  comm_->watch_.end_wait();
  messages_.clear();
  comm_->count_wait(steady_clock::now() - began, description_);
}

// What is thrown on the way, also for want of memory, is a cause: whoever waits must end its wait.
bool GlooOperation::wait_for(GlooMessage& message, std::string* cause) const {
  try {
    if (!message.work) {
      const auto outcome =
          round_ ? comm_->rounds_->wait(*round_, deadline_, message.peer) : wait_in_memory(message, cause);
      if (cause->empty()) *cause = kCauses[static_cast<size_t>(outcome)];
      return outcome == PeerMemory::Outcome::kDone;
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - steady_clock::now());
    return message.work->wait(std::max(left, std::chrono::milliseconds(1)));  // 0 would mean no timeout to c10d
  } catch (const std::exception& error) {
    *cause = error.what();
    return false;
  }
}

PeerMemory::Outcome GlooOperation::wait_in_memory(GlooMessage& message, std::string* cause) const {
  try {
    return comm_->memory_->wait(message.announced, deadline_);
  } catch (const PeerMemory::Unreachable& error) {
    message.peer = error.peer;  // of another message of this operation, maybe
    *cause = error.what();
    return PeerMemory::Outcome::kPeerDied;
  }
}

void GlooOperation::drop_messages(std::vector<at::Tensor>* keeper) noexcept {
  if (keeper != nullptr) keep_memory(messages_, *keeper);
  if (!messages_.empty()) is_aborted_ = true;
  messages_.clear();
  if (pipeline_) PipelineThread::drop(*pipeline_);
}

void GlooOperation::finish() {
  const GlooCommunicator::InCall call(*comm_, description_);
  deadline_ = steady_clock::now() + comm_->timeout();
  if (is_aborted_) comm_->fail(*this, -1, false, "");
  if (round_) comm_->process_.require_this(description_);
  if (pipeline_) wait_for_pipeline();
  wait_for_messages();
  if (complete) complete();
  staging_.clear();
  pipeline_.reset();
}

}  // namespace tessera::internal
