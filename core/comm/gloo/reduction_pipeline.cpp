#include "core/comm/gloo/reduction_pipeline.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "core/comm/rank_order_sum.h"

namespace tessera::internal {
namespace {

// gloo's waits end by themselves at a timeout, and then take all connections along: never, so far as we can wait.
constexpr auto kUntilInterrupted = std::chrono::hours(24 * 365);

}  // namespace

std::vector<at::Tensor> chunks_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  const int64_t chunk_numel = kChunkBytes / static_cast<int64_t>(tensor.element_size());
  if (tensor.numel() <= chunk_numel) return {tensor};
  return tensor.split(chunk_numel);
}

ReductionPipeline::ReductionPipeline(int rank, int world, const std::vector<at::Tensor>& own, const at::Tensor& out,
                                     ReduceOp op, Transport transport)
    : rank_(rank), world_(world), op_(op), transport_(std::move(transport)) {
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
  received_.assign(ahead, std::vector<Work>(world));
}

std::optional<MessageFailure> ReductionPipeline::announce() {
  try {
    for (size_t chunk = 0; chunk < ahead(); ++chunk) receive(chunk);
    return std::nullopt;
  } catch (const std::exception& error) {
    return failure(error.what());
  }
}

void ReductionPipeline::receive(size_t chunk) {
  const size_t place = chunk % ahead();
  is_send_ = false;
  for (int step = 1; step < world_; ++step) {
    peer_ = (rank_ - step + world_) % world_;
    const at::Tensor tensor = places_[place][peer_].narrow(0, 0, own_[chunk].numel());
    received_[place][peer_] = transport_.receive(tensor, peer_);
  }
}

std::optional<MessageFailure> ReductionPipeline::run(const Wait& wait) {
  std::fesetenv(&rounding_);
  try {
    if (sum_up(wait)) return std::nullopt;
    return failure("");
  } catch (const std::exception& error) {
    return failure(error.what());
  }
}

// False where a wait was interrupted.
bool ReductionPipeline::sum_up(const Wait& wait) {
  std::vector<at::Tensor> parts(world_);
  for (size_t chunk = 0; chunk < own_.size(); ++chunk) {
    const size_t place = chunk % ahead();
    is_send_ = false;
    for (peer_ = 0; peer_ < world_; ++peer_) {
      if (peer_ == rank_) continue;
      if (!wait(received_[place][peer_], peer_)) return false;
      received_[place][peer_].reset();
      parts[peer_] = places_[place][peer_];
    }
    parts[rank_] = own_[chunk];
    reduce_in_rank_order_here(out_[chunk], parts, op_);
    is_send_ = true;
    for (int step = 1; transport_.publish && step < world_; ++step) {
      peer_ = (rank_ + step) % world_;
      published_.push_back({transport_.publish(out_[chunk], peer_), peer_});
    }
    if (chunk + ahead() < own_.size()) receive(chunk + ahead());
  }
  return true;
}

void ReductionPipeline::let_go() {
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
    failure = pipeline.run([this](const ReductionPipeline::Work& work, int peer) { return wait_for(work, peer); });
    // Whoever waits has the last reference to the tensors when it is through, not this thread at some time after that.
    if (!failure) pipeline.let_go();
    lock.lock();
    pipeline.is_over_ = !failure;
  }
  if (failure && !std::exchange(stopped_, true)) failure_ = std::move(failure);
  ++ended_;
  changed_.notify_all();
}

bool PipelineThread::wait_for(const ReductionPipeline::Work& work, int peer) {
  {
    std::lock_guard lock(mutex_);
    if (stopped_) return false;
    waits_for_ = work;
    peer_ = peer;
  }
  const auto forget = [this] {
    std::lock_guard lock(mutex_);
    waits_for_.reset();
  };
  bool is_done = false;
  try {
    is_done = work->wait(kUntilInterrupted);
  } catch (...) {
    forget();
    throw;
  }
  forget();
  return is_done;
}

std::optional<MessageFailure> PipelineThread::wait(const ReductionPipeline& pipeline, Deadline until) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_until(lock, until, [&] { return pipeline.is_over_ || stopped_; }))
    return MessageFailure{peer_, false, "timed out"};
  if (pipeline.is_over_) return std::nullopt;
  return failure_.value_or(MessageFailure{peer_, false, ""});
}

std::vector<ReductionPipeline::Published> PipelineThread::published(ReductionPipeline& pipeline) {
  return std::exchange(pipeline.published_, {});
}

void PipelineThread::drop(ReductionPipeline& pipeline) noexcept {
  pipeline.published_.clear();
  pipeline.received_.clear();
}

int PipelineThread::waits_for() {
  std::lock_guard lock(mutex_);
  return waits_for_ ? peer_ : -1;
}

void PipelineThread::interrupt() noexcept {
  std::lock_guard lock(mutex_);
  stopped_ = true;
  if (waits_for_) waits_for_->abort();
  changed_.notify_all();
}

void PipelineThread::stop() noexcept {
  interrupt();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return ended_ == added_; });
}

}  // namespace tessera::internal
