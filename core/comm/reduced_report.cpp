#include "core/comm/reduced_report.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/runtime/stream_uses.h"

namespace tessera::internal {
namespace {

// More would mean that the device is many steps behind: the host then waits for the oldest.
constexpr size_t kMaxWaiting = 4;

// Before the numbers, the fingerprint and its complement, each with the rank below it: the largest of the one is the
// largest fingerprint, of the other the smallest, and they say whose it is, the lowest rank that has it.
constexpr int64_t kAgreement = 2;
constexpr int kRankBits = ReducedReport::kRankBits;
constexpr int64_t kRankMask = (int64_t{1} << kRankBits) - 1;
constexpr int64_t kFingerprintMask = ReducedReport::kLargestAlike;

int64_t folded(uint64_t fingerprint) {
  return static_cast<int64_t>(fingerprint ^ (fingerprint >> (63 - kRankBits))) & kFingerprintMask;
}

}  // namespace

ReducedReport::ReducedReport(Communicator& comm, uint64_t fingerprint, const std::vector<int64_t>& numbers,
                             const std::string& what, const at::Tensor& alike)
    : comm_(&comm), what_(what), numbers_(static_cast<int64_t>(numbers.size())) {
  c10::InferenceMode quiet;
  const bool on_cpu = comm.device().is_cpu();
  const int64_t known = kAgreement + numbers_, unknown = alike.defined() ? alike.numel() : 0;
  const int64_t count = known + 2 * unknown;
  host_ = at::empty({count}, at::TensorOptions(at::kCPU).dtype(at::kLong).pinned_memory(!on_cpu));
  auto* values = host_.mutable_data_ptr<int64_t>();
  const int64_t below = kRankMask - std::min<int64_t>(comm.rank(), kRankMask);
  values[0] = folded(fingerprint) << kRankBits | below;
  values[1] = (kFingerprintMask - folded(fingerprint)) << kRankBits | below;
  std::copy(numbers.begin(), numbers.end(), values + kAgreement);
  device_ = on_cpu ? host_ : at::empty({count}, at::TensorOptions().dtype(at::kLong).device(comm.device()));
  if (!on_cpu) device_.narrow(0, 0, known).copy_(host_.narrow(0, 0, known), /*non_blocking=*/true);
  if (unknown > 0) {
    if (!on_cpu) alike.record_stream(current_stream(comm.device()));  // its maker may let go of it next
    const at::Tensor both = device_.narrow(0, known, 2 * unknown).view({2, unknown});
    both[0].copy_(alike);
    both[1].fill_(kLargestAlike).sub_(alike);
    both.mul_(int64_t{1} << kRankBits).add_(below);
  }
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
  comm_->to_host(host_, what_);  // where it is by now
}

const int64_t* ReducedReport::largest() {
  wait();
  return host_.const_data_ptr<int64_t>() + kAgreement;
}

std::optional<std::pair<int, int>> ReducedReport::unlike_at(int64_t place, int64_t place_of_complement) const {
  const auto* values = host_.const_data_ptr<int64_t>();
  const int64_t largest = values[place], complement = values[place_of_complement];
  if (largest >> kRankBits == kLargestAlike - (complement >> kRankBits)) return {};
  const auto rank_in = [](int64_t value) { return static_cast<int>(kRankMask - (value & kRankMask)); };
  return std::minmax(rank_in(largest), rank_in(complement));
}

std::optional<std::pair<int, int>> ReducedReport::unlike_ranks() {
  wait();
  return unlike_at(0, 1);
}

std::optional<ReducedReport::Unlike> ReducedReport::first_unlike() {
  wait();
  const int64_t first = kAgreement + numbers_, count = (host_.numel() - first) / 2;
  for (int64_t i = 0; i < count; ++i)
    if (const auto ranks = unlike_at(first + i, first + count + i)) return Unlike{static_cast<size_t>(i), *ranks};
  return {};
}

void ReducedReport::require_alike(const std::string& subject) {
  auto ranks = unlike_ranks();
  if (const auto unlike = first_unlike(); unlike && !ranks) ranks = unlike->ranks;
  if (ranks)
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
