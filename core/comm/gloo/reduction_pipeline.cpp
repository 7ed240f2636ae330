#include "core/comm/gloo/reduction_pipeline.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "core/comm/rank_order_sum.h"

namespace tessera::internal {

std::vector<at::Tensor> chunks_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  const int64_t chunk_numel = kChunkBytes / static_cast<int64_t>(tensor.element_size());
  if (tensor.numel() <= chunk_numel) return {tensor};
  return tensor.split(chunk_numel);
}

ReductionPipeline::ReductionPipeline(int rank, int world, const std::vector<at::Tensor>& own, const at::Tensor& out,
                                     ReduceOp op, Exchange exchange)
    : rank_(rank), world_(world), op_(op), exchange_(std::move(exchange)) {
  std::fegetenv(&rounding_);
  int64_t begin = 0, most_numel = 0;
  for (const at::Tensor& segment : own) {
    for (const at::Tensor& chunk : chunks_of(segment)) {
      most_numel = std::max(most_numel, chunk.numel());
      own_.push_back(chunk);
      out_.push_back(out.narrow(0, begin, chunk.numel()));
      begin += chunk.numel();
    }
  }
  if (own_.empty()) return;
  const auto count = static_cast<int64_t>(own_.size());
  const int64_t ahead = std::min(count, std::max(kLeastAhead, kStagingBytes / kChunkBytes / (world - 1)));
  staging_ = at::empty({ahead, world - 1, most_numel}, out.options());
  for (int64_t place = 0; place < ahead; ++place) {
    auto rows = staging_.select(0, place).unbind(0);
    rows.insert(rows.begin() + rank, at::Tensor());
    places_.push_back(std::move(rows));
  }
  received_.assign(ahead, TransportMessages(world));
}

std::optional<MessageFailure> ReductionPipeline::announce() {
  for (size_t chunk = 0; chunk < ahead(); ++chunk)
    if (auto failure = receive(chunk)) return failure;
  return std::nullopt;
}

std::optional<MessageFailure> ReductionPipeline::receive(size_t chunk) {
  const size_t place = chunk % ahead();
  int peer = -1;
  try {
    for (int step = 1; step < world_; ++step) {
      peer = (rank_ - step + world_) % world_;
      const at::Tensor tensor = places_[place][peer].narrow(0, 0, own_[chunk].numel());
      received_[place][peer] = exchange_.receive(tensor, peer);
    }
    return std::nullopt;
  } catch (const std::exception& error) {
    return MessageFailure{peer, /*is_send=*/false, error.what()};
  }
}

std::optional<MessageFailure> ReductionPipeline::publish(size_t chunk) {
  int peer = -1;
  try {
    for (int step = 1; exchange_.publish && step < world_; ++step) {
      peer = (rank_ + step) % world_;
      published_.push_back(exchange_.publish(out_[chunk], peer));
    }
    return std::nullopt;
  } catch (const std::exception& error) {
    return MessageFailure{peer, /*is_send=*/true, error.what()};
  }
}

std::optional<MessageFailure> ReductionPipeline::run(const Wait& wait) {
  std::fesetenv(&rounding_);
  std::vector<at::Tensor> parts(world_);
  for (size_t chunk = 0; chunk < own_.size(); ++chunk) {
    const size_t place = chunk % ahead();
    for (int peer = 0; peer < world_; ++peer) {
      if (peer == rank_) continue;
      if (auto failure = wait(received_[place][peer])) return failure;
      received_[place][peer].reset();
      parts[peer] = places_[place][peer];
    }
    parts[rank_] = own_[chunk];
    try {
      reduce_in_rank_order_here(out_[chunk], parts, op_);
    } catch (const std::exception& error) {
      return MessageFailure{-1, /*is_send=*/false, error.what()};
    }
    if (auto failure = publish(chunk)) return failure;
    if (chunk + ahead() >= own_.size()) continue;
    if (auto failure = receive(chunk + ahead())) return failure;
  }
  return std::nullopt;
}

void ReductionPipeline::free_memory() {
  own_.clear();
  out_.clear();
  places_.clear();
  staging_.reset();
}

void PipelineThread::add(const std::shared_ptr<ReductionPipeline>& pipeline) {
  if (!thread_) thread_ = std::make_unique<TaskQueue>(1);
  {
    std::lock_guard lock(mutex_);
    ++added_;
  }
  thread_->add([this, pipeline] { run(*pipeline); });
}

void PipelineThread::run(ReductionPipeline& pipeline) {
  std::unique_lock lock(mutex_);
  std::optional<MessageFailure> failure;
  if (!stopped_) {
    lock.unlock();
    failure = pipeline.run([this](const ReductionPipeline::Message& message) { return wait_for(message); });
    // Frees the tensors before wait() returns, because the caller of wait() must then have the only references.
    if (!failure) pipeline.free_memory();
    lock.lock();
    pipeline.is_over_ = !failure;
  }
  if (failure && !std::exchange(stopped_, true)) failure_ = std::move(failure);
  ++ended_;
  changed_.notify_all();
}

std::optional<MessageFailure> PipelineThread::wait_for(const ReductionPipeline::Message& message) {
  {
    std::lock_guard lock(mutex_);
    if (stopped_) return MessageFailure{message->peer(), message->is_send(), ""};
    waits_for_ = message;
    peer_ = message->peer();
  }
  std::optional<MessageFailure> failure;
  try {
    failure = message->wait(RunClock::now() + kUntilInterrupted);
  } catch (const std::exception& error) {
    failure = MessageFailure{message->peer(), message->is_send(), error.what()};
  }
  std::lock_guard lock(mutex_);
  waits_for_.reset();
  return failure;
}

std::optional<MessageFailure> PipelineThread::wait(const ReductionPipeline& pipeline, Deadline until) {
  std::unique_lock lock(mutex_);
  if (!wait_in_slices(until, [&](auto slice) {
        return changed_.wait_for(lock, slice, [&] { return pipeline.is_over_ || stopped_; });
      }))
    return MessageFailure{peer_, false, "timed out"};
  if (pipeline.is_over_) return std::nullopt;
  return failure_.value_or(MessageFailure{peer_, false, ""});
}

TransportMessages PipelineThread::published(ReductionPipeline& pipeline) {
  return std::exchange(pipeline.published_, {});
}

void PipelineThread::drop(ReductionPipeline& pipeline) noexcept {
  pipeline.published_.clear();
  pipeline.received_.clear();
}

std::string PipelineThread::why_disconnected() {
  std::unique_lock lock(mutex_);
  const ReductionPipeline::Message message = waits_for_;
  lock.unlock();
  return message ? message->why_disconnected() : "";
}

void PipelineThread::interrupt() noexcept {
  std::lock_guard lock(mutex_);
  stopped_ = true;
  if (waits_for_) waits_for_->interrupt();
  changed_.notify_all();
}

void PipelineThread::stop() noexcept {
  interrupt();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return ended_ == added_; });
}

}  // namespace tessera::internal
