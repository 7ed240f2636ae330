#include "tessera/comm/communicator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <numeric>
#include <sstream>
#include <stdexcept>

#include "tessera/trace/trace.h"

namespace tessera {
namespace {

// An operation with a span of its own, from here until it is waited for, and one for the wait.
class TracedOperation : public Pending::Operation {
 public:
  TracedOperation(SpanKind kind, const char* operation, std::string_view what, Pending pending)
      : kind_(kind), operation_(operation), what_(what.empty() ? operation : what), pending_(std::move(pending)) {}
  void finish() override {
    const auto waits = Trace::Clock::now();
    pending_.wait();
    const auto end = Trace::Clock::now();
    Trace::active()->add(SpanKind::kWait, what_, operation_, waits, end);
    Trace::active()->add(kind_, what_, operation_, began_, end);
  }

 private:
  const SpanKind kind_;
  const char* const operation_;
  const std::string what_;
  const Trace::Clock::time_point began_ = Trace::Clock::now();
  Pending pending_;
};

Pending traced(SpanKind kind, const char* operation, std::string_view what, Pending pending) {
  if (Trace::active() == nullptr || pending.done()) return pending;
  return Pending(std::make_unique<TracedOperation>(kind, operation, what, std::move(pending)));
}

// The raw bytes move, so a tensor that was made under InferenceMode is as good as any, and
// nothing here may be recorded by autograd.
void copy_bytes(const at::Tensor& to, const at::Tensor& from) {
  c10::InferenceMode quiet;
  if (to.const_data_ptr() != from.const_data_ptr()) to.copy_(from);
}

template <class... Parts>
[[noreturn]] void refuse(Parts&&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

}  // namespace

Communicator::~Communicator() = default;

at::Tensor Communicator::checked(const at::Tensor& tensor, const char* operation, const char* argument) const {
  if (!tensor.defined()) refuse(operation, " on rank ", rank_, ": ", argument, " is undefined");
  if (tensor.device() != device_)
    refuse(operation, " on rank ", rank_, ": ", argument, " is on ", tensor.device(), ", expected ", device_);
  if (!tensor.is_contiguous())
    refuse(operation, " on rank ", rank_, ": ", argument, " is not contiguous; shape ", tensor.sizes());
  return tensor.detach().view({-1});
}

void Communicator::check_reducible(const at::Tensor& tensor, ReduceOp op, const char* operation,
                                   std::string_view what) const {
  const at::ScalarType dtype = tensor.scalar_type();
  const bool is_integral =
      dtype == at::kByte || dtype == at::kChar || dtype == at::kShort || dtype == at::kInt || dtype == at::kLong;
  const bool is_floating = dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble;
  const bool is_average = op == ReduceOp::kAverage;
  if (is_floating || (is_integral && !is_average)) return;
  refuse(operation, what.empty() ? "" : " of ", what, " on rank ", rank_, ": the tensor is ", dtype, ", expected ",
         is_average ? "" : "an integral type of 8 to 64 bits, ", "Half, BFloat16, Float or Double",
         is_average ? " for an average" : "");
}

Communicator::Counts Communicator::checked(Counts counts, const at::Tensor& full, const at::Tensor& shard,
                                           const char* operation) const {
  if (counts.empty()) counts.assign(size_, shard.numel());
  if (static_cast<int>(counts.size()) != size_)
    refuse(operation, " on rank ", rank_, ": ", counts.size(), " counts, expected one per rank: ", size_);
  for (int64_t count : counts)
    if (count < 0) refuse(operation, " on rank ", rank_, ": a count of ", count);
  if (shard.numel() != counts[rank_])
    refuse(operation, " on rank ", rank_, ": the shard has ", shard.numel(), " elements, expected ", counts[rank_]);
  const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  if (full.defined() && full.numel() != total)
    refuse(operation, " on rank ", rank_, ": the full tensor has ", full.numel(), " elements, expected ", total);
  if (full.defined() && full.scalar_type() != shard.scalar_type())
    refuse(operation, " on rank ", rank_, ": the full tensor is ", full.scalar_type(), " and the shard ",
           shard.scalar_type(), ", expected one dtype");
  return counts;
}

void Communicator::check_root(int root, const char* operation) const {
  if (root < 0 || root >= size_) refuse(operation, " on rank ", rank_, ": root ", root, ", expected 0 to ", size_ - 1);
}

Pending Communicator::all_gather(at::Tensor full, at::Tensor shard, std::vector<int64_t> counts,
                                 std::string_view what) {
  full = checked(full, "all-gather", "the full tensor");
  shard = checked(shard, "all-gather", "the shard");
  counts = checked(std::move(counts), full, shard, "all-gather");
  count(&Counters::collectives, 1);
  if (size_ > 1)
    return traced(SpanKind::kGather, "all-gather", what,
                  start_all_gather(std::move(full), std::move(shard), std::move(counts), std::string(what)));
  copy_bytes(full, shard);
  return {};
}

Pending Communicator::reduce_scatter(at::Tensor shard, at::Tensor full, ReduceOp op, std::vector<int64_t> counts,
                                     std::string_view what) {
  full = checked(full, "reduce-scatter", "the full tensor");
  shard = checked(shard, "reduce-scatter", "the shard");
  counts = checked(std::move(counts), full, shard, "reduce-scatter");
  check_reducible(full, op, "reduce-scatter", what);
  count(&Counters::collectives, 1);
  if (size_ > 1)
    return traced(SpanKind::kReduce, "reduce-scatter", what,
                  start_reduce_scatter(std::move(shard), std::move(full), op, std::move(counts), std::string(what)));
  copy_bytes(shard, full);
  return {};
}

Pending Communicator::all_reduce(at::Tensor tensor, ReduceOp op, std::string_view what) {
  tensor = checked(tensor, "all-reduce", "the tensor");
  check_reducible(tensor, op, "all-reduce", what);
  count(&Counters::collectives, 1);
  if (size_ == 1) return {};
  return traced(SpanKind::kReduce, "all-reduce", what, start_all_reduce(std::move(tensor), op, std::string(what)));
}

Pending Communicator::broadcast(at::Tensor tensor, int root, std::string_view what) {
  check_root(root, "broadcast");
  tensor = checked(tensor, "broadcast", "the tensor");
  count(&Counters::collectives, 1);
  if (size_ == 1) return {};
  return traced(SpanKind::kGather, "broadcast", what, start_broadcast(std::move(tensor), root, std::string(what)));
}

Pending Communicator::reduce(at::Tensor tensor, int root, ReduceOp op, std::string_view what) {
  check_root(root, "reduce");
  tensor = checked(tensor, "reduce", "the tensor");
  check_reducible(tensor, op, "reduce", what);
  count(&Counters::collectives, 1);
  if (size_ == 1) return {};
  return traced(SpanKind::kReduce, "reduce", what, start_reduce(std::move(tensor), root, op, std::string(what)));
}

Pending Communicator::scatter(at::Tensor shard, at::Tensor full, int root, std::vector<int64_t> counts,
                              std::string_view what) {
  check_root(root, "scatter");
  shard = checked(shard, "scatter", "the shard");
  full = rank_ == root ? checked(full, "scatter", "the full tensor") : at::Tensor();
  counts = checked(std::move(counts), full, shard, "scatter");
  count(&Counters::collectives, 1);
  if (size_ > 1)
    return traced(SpanKind::kGather, "scatter", what,
                  start_scatter(std::move(shard), std::move(full), root, std::move(counts), std::string(what)));
  copy_bytes(shard, full);
  return {};
}

void Communicator::barrier(std::string_view what) {
  c10::InferenceMode quiet;
  at::Tensor arrived = at::zeros({size_}, at::TensorOptions().dtype(at::kByte).device(device_));
  at::Tensor self = arrived.narrow(0, rank_, 1);
  all_gather(arrived, self, {}, what.empty() ? "barrier" : what).wait();
  if (device_.is_cuda()) arrived.cpu();  // the host, too, must not pass before the others arrive
}

std::shared_ptr<Communicator> Communicator::split(int color, int key) {
  c10::InferenceMode quiet;
  at::Tensor own = at::empty({2}, at::kLong);
  own.data_ptr<int64_t>()[0] = color;
  own.data_ptr<int64_t>()[1] = key;
  own = own.to(device_);
  at::Tensor all = at::empty({2 * size_}, own.options());
  all_gather(all, own, {}, "the colors of a split").wait();
  all = all.cpu();
  const auto* pairs = all.const_data_ptr<int64_t>();
  std::vector<int> members;
  for (int rank = 0; rank < size_; ++rank)
    if (pairs[2 * rank] == color) members.push_back(rank);
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) { return pairs[2 * a + 1] < pairs[2 * b + 1]; });

  std::unique_lock lock(parts_mutex_);
  const int64_t number = splits_++;
  lock.unlock();
  if (color < 0) return nullptr;
  const auto self = static_cast<int>(std::find(members.begin(), members.end(), rank_) - members.begin());
  auto part =
      make_part("split" + std::to_string(number) + "/" + std::to_string(color), self, static_cast<int>(members.size()));
  std::ostringstream label;
  for (int member : members) label << (label.str().empty() ? "ranks " : ", ") << member;
  label << " of " << size_ << (label_.empty() ? "" : ", in ") << label_;
  part->label_ = label.str();
  part->counters_.insert(part->counters_.end(), counters_.begin(), counters_.end());
  lock.lock();
  parts_.push_back(part);
  return part;
}

void Communicator::abort(const std::string& reason) noexcept {
  abort_this(reason);
  std::vector<std::shared_ptr<Communicator>> parts;
  {
    std::lock_guard lock(parts_mutex_);
    parts = parts_;
  }
  for (const auto& part : parts) part->abort(reason);
}

Traffic Communicator::traffic() const noexcept {
  const Counters& own = *counters_.front();
  return {own.sent_bytes.load(), own.collectives.load(), static_cast<double>(own.wait_ns.load()) * 1e-9};
}

}  // namespace tessera
