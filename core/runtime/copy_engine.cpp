#include "core/runtime/copy_engine.h"

#include <c10/util/StringUtil.h>

#include <stdexcept>
#include <vector>

namespace tessera::internal {

Copy CopyEngine::checked_start(CopyDirection direction, const at::Tensor& to, const at::Tensor& from) {
  const at::Tensor& on_device = direction == CopyDirection::kToDevice ? to : from;
  const at::Tensor& on_host = direction == CopyDirection::kToDevice ? from : to;
  if (on_device.device() != device_ || !on_host.device().is_cpu() || to.scalar_type() != from.scalar_type() ||
      to.numel() != from.numel() || !to.is_contiguous() || !from.is_contiguous()) {
    throw std::invalid_argument(
        c10::str("a copy between host and device: to ", to.scalar_type(), " ", to.sizes(), " on ", to.device(),
                 " from ", from.scalar_type(), " ", from.sizes(), " on ", from.device(),
                 ", expected contiguous tensors of one dtype and numel, one in host memory and one on ", device_));
  }
  const auto bytes = static_cast<int64_t>(from.nbytes());
  (direction == CopyDirection::kToDevice ? counters_->to_device_bytes : counters_->to_host_bytes) += bytes;
  ++counters_->copies;
  in_use_->remove_ended();
  return start(direction, to, from);
}

int64_t HostMemoryInUse::add(at::Tensor host, std::shared_ptr<CopyEnd> end) {
  std::lock_guard lock(mutex_);
  held_[next_] = {std::move(host), std::move(end)};
  return next_++;
}

void HostMemoryInUse::remove(int64_t number) {
  Held gone;  // destroyed after the lock is released
  std::lock_guard lock(mutex_);
  if (const auto use = held_.find(number); use != held_.end()) {
    gone = std::move(use->second);
    held_.erase(use);
  }
}

void HostMemoryInUse::remove_ended() {
  std::vector<Held> gone;
  std::lock_guard lock(mutex_);
  std::erase_if(held_, [&](auto& use) {
    if (!use.second.end->is_over()) return false;
    gone.push_back(std::move(use.second));
    return true;
  });
}

void HostMemoryInUse::wait_for(const at::Tensor& host) {
  std::vector<std::shared_ptr<CopyEnd>> ends;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [number, use] : held_)
      if (use.host.is_alias_of(host) && !use.end->is_over()) ends.push_back(use.end);
  }
  for (const auto& end : ends) end->wait();
  if (!ends.empty()) remove_ended();
}

CopyTraffic CopyEngine::traffic() const {
  return {counters_->to_device_bytes, counters_->to_host_bytes, counters_->copies, counters_->late_copies};
}

}  // namespace tessera::internal
