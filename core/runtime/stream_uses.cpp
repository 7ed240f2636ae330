#include "core/runtime/stream_uses.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace tessera::internal {

void make_current(c10::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
}

c10::Device with_index(c10::Device device) {
  if (device.has_index() || !c10::impl::hasDeviceGuardImpl(device.type())) return device;
  return device.is_cpu() ? device : c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

void order_streams(const c10::Stream& first, const c10::Stream& then) {
  if (first == then) return;
  c10::Event event(first.device_type());
  event.record(first);
  event.block(then);
}

void StreamUses::begin(c10::Device device) {
  users_.clear();
  if (device.is_cpu()) return;
  users_.push_back(current_stream(device));
  if (ready_.use_count() != 1)
    ready_ = std::make_shared<c10::Event>(device.type());  // a copy of this object may still need the old event
  ready_->record(users_[0]);
}

void StreamUses::use() {
  if (users_.empty()) return;
  const c10::Stream here = current_stream(users_[0].device());
  if (std::ranges::find(users_, here) != users_.end()) return;
  ready_->block(here);
  users_.push_back(here);
}

void StreamUses::join() {
  if (users_.empty()) return;
  const c10::Stream here = current_stream(users_[0].device());
  for (const c10::Stream& user : users_) order_streams(user, here);
  if (std::ranges::find(users_, here) == users_.end()) users_.push_back(here);
}

}  // namespace tessera::internal
