#include "core/comm/gloo/operations_in_flight.h"

#include <c10/util/StringUtil.h>

#include <utility>

#include <tessera/errors.h>

namespace tessera::internal {

void OperationResources::drop(std::vector<at::Tensor>* keeper) noexcept {
  for (const auto& message : messages)
    if (const at::Tensor tensor = message->exposed_tensor(); keeper != nullptr && tensor.defined())
      keeper->push_back(tensor);
  if (!messages.empty()) is_aborted = true;
  messages.clear();
  if (pipeline) PipelineThread::drop(*pipeline);
}

void OperationsInFlight::require_whole(const std::string& what) const {
  std::lock_guard lock(mutex_);
  if (broken_) throw CommError(c10::str(what, ": ", *broken_));
}

std::optional<std::string> OperationsInFlight::broken() const {
  std::lock_guard lock(mutex_);
  return broken_;
}

bool OperationsInFlight::is_closed() const {
  std::lock_guard lock(mutex_);
  return is_closed_;
}

void OperationsInFlight::break_group(const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (!broken_) broken_ = reason;
}

void OperationsInFlight::add(OperationResources& operation, const std::string& what) {
  std::lock_guard lock(mutex_);
  if (broken_) throw CommError(c10::str(what, ": ", *broken_));
  operations_.insert(&operation);
}

void OperationsInFlight::remove(OperationResources& operation, bool may_complete) noexcept {
  std::lock_guard lock(mutex_);
  operations_.erase(&operation);
  if (is_closed_) return;
  if (may_complete)
    std::erase_if(operation.messages, [](const auto& message) { return message->complete_without_waiting(); });
  if (operation.messages.empty()) operation.staging.clear();
  if (!operation.messages.empty() || operation.pipeline) orphans_.push_back(std::move(operation));
}

bool OperationsInFlight::begin_wait_locked(std::shared_ptr<InterruptibleWait> wait) {
  current_wait_ = std::move(wait);
  return !broken_;
}

bool OperationsInFlight::begin_wait(std::shared_ptr<InterruptibleWait> wait) {
  std::lock_guard lock(mutex_);
  return begin_wait_locked(std::move(wait));
}

bool OperationsInFlight::begin_message_wait(const std::shared_ptr<TransportMessage>& message) {
  std::lock_guard lock(mutex_);
  if (!broken_) message->prepare_wait();
  return begin_wait_locked(message);
}

void OperationsInFlight::end_wait() {
  std::lock_guard lock(mutex_);
  current_wait_.reset();
}

void OperationsInFlight::interrupt() noexcept {
  std::lock_guard lock(mutex_);
  if (current_wait_) current_wait_->interrupt();
}

std::string OperationsInFlight::why_disconnected() {
  std::unique_lock lock(mutex_);
  const auto wait = current_wait_;
  lock.unlock();
  return wait ? wait->why_disconnected() : "";
}

void OperationsInFlight::close(GlooTransports& transports) noexcept {
  // Tensors that a stopped peer may access when it continues. Their memory must never be reused.
  static auto* const kept = new std::vector<at::Tensor>;
  static std::mutex keeping;
  std::lock_guard lock(mutex_);
  if (std::exchange(is_closed_, true)) return;
  const bool are_withdrawn = transports.withdraw();
  current_wait_.reset();
  {
    std::lock_guard keeps(keeping);
    std::vector<at::Tensor>* const keeper = are_withdrawn ? nullptr : kept;
    for (OperationResources* operation : operations_) operation->drop(keeper);
    for (OperationResources& orphan : orphans_) orphan.drop(keeper);
  }
  orphans_.clear();
  // After `keeping` is unlocked: gloo waits up to 10 ms for its thread, and ranks of one process would wait in turn.
  transports.disconnect();
}

}  // namespace tessera::internal
