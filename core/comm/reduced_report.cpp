#include "core/comm/reduced_report.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <stdexcept>

namespace tessera::internal {
namespace {

// The largest number of reports that look() leaves queued. If the device is further behind, the host waits.
constexpr size_t kMaxWaiting = 4;

// The first two words are the fingerprint and its complement; the numbers follow. The maxima of the two words yield the
// largest and smallest fingerprint. Low bits hold kRankMask - rank, to find the lowest rank with each maximum.
constexpr int64_t kAgreement = 2;
constexpr int kRankBits = 20;
constexpr int64_t kRankMask = (int64_t{1} << kRankBits) - 1;
constexpr int64_t kFingerprintMask = (int64_t{1} << (63 - kRankBits)) - 1;

int64_t folded(uint64_t fingerprint) {
  return static_cast<int64_t>(fingerprint ^ (fingerprint >> (63 - kRankBits))) & kFingerprintMask;
}

}  // namespace

ReducedReport::ReducedReport(Communicator& comm, uint64_t fingerprint, const std::vector<int64_t>& numbers,
                             const std::string& what)
    : comm_(&comm), what_(what), numbers_(static_cast<int64_t>(numbers.size())) {
  c10::InferenceMode quiet;
  const bool on_cpu = comm.device().is_cpu();
  const int64_t count = kAgreement + numbers_;
  host_ = at::empty({count}, at::TensorOptions(at::kCPU).dtype(at::kLong).pinned_memory(!on_cpu));
  auto* values = host_.mutable_data_ptr<int64_t>();
  const int64_t below = kRankMask - std::min<int64_t>(comm.rank(), kRankMask);
  values[0] = folded(fingerprint) << kRankBits | below;
  values[1] = (kFingerprintMask - folded(fingerprint)) << kRankBits | below;
  std::ranges::copy(numbers, values + kAgreement);
  device_ = on_cpu ? host_ : at::empty({count}, at::TensorOptions().dtype(at::kLong).device(comm.device()));
  if (!on_cpu) device_.copy_(host_, /*non_blocking=*/true);
  exchange_ = comm.all_reduce(device_, ReduceOp::kMax, what);
}

void ReducedReport::finish() {
  if (std::exchange(is_finished_, true)) return;
  exchange_.wait();
  if (device_.is_cpu()) return;
  c10::InferenceMode quiet;
  host_.copy_(device_, /*non_blocking=*/true);
  arrived_.emplace(device_.device().type());
  arrived_->record(c10::impl::VirtualGuardImpl(device_.device().type()).getStream(device_.device()));
}

bool ReducedReport::has_arrived() const { return !arrived_ || arrived_->query(); }

void ReducedReport::wait() {
  if (!has_arrived()) arrived_->synchronize();
  comm_->to_host(host_, what_);  // throws CommError if the all-reduce was aborted
}

const int64_t* ReducedReport::largest() {
  wait();
  return host_.const_data_ptr<int64_t>() + kAgreement;
}

std::optional<std::pair<int, int>> ReducedReport::unlike_ranks() {
  wait();
  const auto* values = host_.const_data_ptr<int64_t>();
  const int64_t largest = values[0], complement = values[1];
  if (largest >> kRankBits == kFingerprintMask - (complement >> kRankBits)) return {};
  const auto rank_in = [](int64_t value) { return static_cast<int>(kRankMask - (value & kRankMask)); };
  return std::minmax(rank_in(largest), rank_in(complement));
}

void ReducedReport::require_alike(const std::string& subject) {
  if (const auto ranks = unlike_ranks())
    throw std::invalid_argument(c10::str("the ranks disagree about ", subject, ": ranks ", ranks->first, " and ",
                                         ranks->second, " did not do the same"));
}

void LateReports::look() {
  for (auto& [report, look] : waiting_) report.finish();
  while (!waiting_.empty() && (waiting_.front().first.has_arrived() || waiting_.size() > kMaxWaiting)) {
    auto [report, look] = std::move(waiting_.front());
    waiting_.pop_front();
    look(report);
  }
}

}  // namespace tessera::internal
