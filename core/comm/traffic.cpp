#include "core/comm/traffic.h"

#include <utility>

namespace tessera::internal {

void TrafficCounter::add_wait(std::chrono::nanoseconds duration, const std::string& operation) {
  constexpr size_t kMaxOperations = 4096;  // limits memory if a program puts numbers into operation names
  wait_ns_ += duration.count();
  const std::lock_guard lock(waits_mutex_);
  if (!waits_) return;
  const bool has_room = waits_->size() < kMaxOperations || waits_->contains(operation);
  (*waits_)[has_room ? operation : "other operations"] += std::chrono::duration<double>(duration).count();
}

Traffic TrafficCounter::total() const noexcept {
  return {sent_bytes_.load(), collectives_.load(), static_cast<double>(wait_ns_.load()) * 1e-9};
}

std::map<std::string, double> TrafficCounter::reset_wait_times() {
  const std::lock_guard lock(waits_mutex_);
  return std::exchange(waits_, std::map<std::string, double>()).value_or(std::map<std::string, double>());
}

int64_t bytes_sent(const Collective& collective, int rank, int size) {
  auto full_bytes = static_cast<int64_t>(collective.full.defined() ? collective.full.nbytes() : 0);
  for (const at::Tensor& piece : collective.pieces) full_bytes += static_cast<int64_t>(piece.nbytes());
  const auto shard_bytes = static_cast<int64_t>(collective.shard.defined() ? collective.shard.nbytes() : 0);
  const bool is_root = rank == collective.root;
  switch (collective.kind) {
    case Collective::kAllGather:
      return shard_bytes * (size - 1);
    case Collective::kReduceScatter:
      return full_bytes - shard_bytes;
    case Collective::kAllReduce:
    case Collective::kBackendAllReduce:
      return 2 * full_bytes * (size - 1) / size;
    case Collective::kBroadcast:
      return is_root ? full_bytes : 0;
    case Collective::kReduce:
      return is_root ? 0 : full_bytes;
    case Collective::kScatter:
      return is_root ? full_bytes - shard_bytes : 0;
    case Collective::kAllToAll:
      return (collective.all_to_all.sent.numel() - collective.all_to_all.send_counts[rank]) *
             collective.all_to_all.sent.element_size();
  }
  return 0;
}

}  // namespace tessera::internal
