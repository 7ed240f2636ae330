#include "core/comm/nccl/nccl_queue.h"

#include <exception>
#include <utility>

#include "core/comm/group_process.h"

namespace tessera::internal {

void NcclQueue::push(Work work, const std::string& description) {
  std::lock_guard lock(mutex_);
  operations_.push_back({std::move(work), description, Clock::now()});
}

NcclQueue::Look NcclQueue::look() {
  Look look{};
  std::lock_guard lock(mutex_);
  while (!operations_.empty() && operations_.front().work->isCompleted()) {
    // An aborted operation also counts as complete, so its exception must be read.
    const std::exception_ptr exception = operations_.front().work->exception();
    if (exception) look.error = text_of(exception);
    if (!look.error.empty()) break;
    look.ended.push_back(std::move(operations_.front()));
    operations_.pop_front();
    ++ended_count_;
    // The next operation's timeout begins now: it may have been enqueued long before the device could run it.
    if (!operations_.empty()) operations_.front().began = Clock::now();
  }
  if (!operations_.empty()) look.oldest = operations_.front();
  look.ends = ends_;
  look.ended_count = ended_count_;
  return look;
}

bool NcclQueue::sleep(const std::stop_token& stop, std::chrono::milliseconds duration) {
  std::unique_lock lock(mutex_);
  return !changed_.wait_for(lock, stop, duration, [&] { return stop.stop_requested(); });
}

void NcclQueue::notify() {
  std::lock_guard lock(mutex_);
  changed_.notify_all();
}

void NcclQueue::wait_until_empty() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return operations_.empty() || end_; });
}

std::optional<std::string> NcclQueue::begin_end() {
  std::lock_guard lock(mutex_);
  if (std::exchange(ends_, true)) return std::nullopt;
  return operations_.empty() ? "an operation" : operations_.front().description;
}

void NcclQueue::complete_end(std::string reason, bool is_told) {
  std::lock_guard lock(mutex_);
  end_ = End{std::move(reason), is_told};
  changed_.notify_all();
}

std::optional<std::string> NcclQueue::reason_to_tell() {
  std::lock_guard lock(mutex_);
  if (!end_) return std::nullopt;
  end_->is_told = true;
  return end_->reason;
}

std::optional<NcclQueue::End> NcclQueue::wait_for_end() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !ends_ || end_; });
  return end_;
}

}  // namespace tessera::internal
