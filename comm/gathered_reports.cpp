#include "tessera/comm/gathered_reports.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/StringUtil.h>

#include <cstring>
#include <stdexcept>

namespace tessera {

// More would mean that the device is many steps behind: the host then waits for the oldest.
static constexpr size_t kMaxWaiting = 4;

GatheredReports::GatheredReports(Communicator& comm, const std::vector<uint8_t>& own, const std::string& what) {
  c10::InferenceMode quiet;
  const bool on_cpu = comm.device().is_cpu();
  const auto bytes = static_cast<int64_t>(own.size());
  const auto host = at::TensorOptions(at::kCPU).dtype(at::kByte).pinned_memory(!on_cpu);
  own_ = at::empty({bytes}, host);
  std::memcpy(own_.mutable_data_ptr(), own.data(), own.size());
  on_device_ = on_cpu ? own_ : at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(comm.device()));
  if (!on_cpu) on_device_.copy_(own_, /*non_blocking=*/true);
  all_ = at::empty({comm.size(), bytes}, on_device_.options());
  table_ = on_cpu ? all_ : at::empty({comm.size(), bytes}, host);
  exchange_ = comm.all_gather(all_, on_device_, {}, what);
}

void GatheredReports::finish() {
  exchange_.wait();
  if (all_.is_cpu()) return;
  c10::InferenceMode quiet;
  table_.copy_(all_, /*non_blocking=*/true);
  arrived_.emplace(all_.device().type());
  arrived_->record(c10::impl::VirtualGuardImpl(all_.device().type()).getStream(all_.device()));
}

bool GatheredReports::have_arrived() const { return !arrived_ || arrived_->query(); }

const at::Tensor& GatheredReports::wait() {
  if (!have_arrived()) arrived_->synchronize();
  return table_;
}

std::optional<int64_t> first_unlike(const at::Tensor& table, int64_t bytes) {
  const auto* first = table.const_data_ptr<uint8_t>();
  for (int64_t rank = 1; rank < table.size(0); ++rank)
    if (std::memcmp(first + rank * table.size(1), first, static_cast<size_t>(bytes)) != 0) return rank;
  return {};
}

void GatheredReports::require_alike(int64_t bytes, const std::string& subject) {
  if (const auto rank = first_unlike(wait(), bytes))
    throw std::invalid_argument(
        c10::str("the ranks disagree about ", subject, ": ranks 0 and ", *rank, " did not do the same"));
}

void LateReports::require_alike(int64_t bytes, const std::string& subject) {
  while (!waiting_.empty() && (waiting_.front().have_arrived() || waiting_.size() > kMaxWaiting)) {
    GatheredReports reports = std::move(waiting_.front());
    waiting_.pop_front();
    reports.require_alike(bytes, subject);
  }
}

}  // namespace tessera
