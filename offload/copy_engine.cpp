#include "tessera/offload/copy_engine.h"

#include <sstream>
#include <stdexcept>

#include "tessera/offload/simulated_link.h"

namespace tessera {

std::unique_ptr<CopyEngine> CopyEngine::make(at::Device device) {
  const SimulatedLink* link = SimulatedLinkScope::current();
  if (device.is_cpu()) return make_thread_copy_engine(link != nullptr ? *link : SimulatedLink());
  if (link != nullptr)
    throw std::invalid_argument("a SimulatedLink on " + device.str() + ": only a CPU's link is simulated");
  return make_stream_copy_engine(device);
}

Copy CopyEngine::checked_start(CopyDirection direction, const at::Tensor& to, const at::Tensor& from) {
  const at::Tensor& on_device = direction == CopyDirection::kToDevice ? to : from;
  const at::Tensor& on_host = direction == CopyDirection::kToDevice ? from : to;
  if (on_device.device() != device_ || !on_host.device().is_cpu() || to.scalar_type() != from.scalar_type() ||
      to.numel() != from.numel() || !to.is_contiguous() || !from.is_contiguous()) {
    std::ostringstream text;
    text << "a copy between host and device: to " << to.scalar_type() << " " << to.sizes() << " on " << to.device()
         << " from " << from.scalar_type() << " " << from.sizes() << " on " << from.device()
         << ", expected contiguous tensors of one dtype and numel, one in host memory and one on " << device_;
    throw std::invalid_argument(text.str());
  }
  const auto bytes = static_cast<int64_t>(from.nbytes());
  (direction == CopyDirection::kToDevice ? counters_->to_device_bytes : counters_->to_host_bytes) += bytes;
  ++counters_->copies;
  return start(direction, to, from);
}

CopyTraffic CopyEngine::traffic() const {
  return {counters_->to_device_bytes, counters_->to_host_bytes, counters_->copies, counters_->late_copies};
}

}  // namespace tessera
