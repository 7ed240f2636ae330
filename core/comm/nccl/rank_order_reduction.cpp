#include "core/comm/nccl/rank_order_reduction.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "core/comm/rank_order_sum.h"
#include "core/runtime/graph_recorder.h"
#include "core/runtime/stream_uses.h"

namespace tessera::internal {
namespace {

using Exchange = c10::intrusive_ptr<c10d::Work>;

// The exchanges and additions of one reduction. Completes when its stream has run all of them.
class ReductionWork final : public c10d::Work {
 public:
  ReductionWork(c10::Stream stream, std::vector<Exchange> exchanges, std::vector<at::Tensor> tensors)
      : stream_(stream),
        end_(stream.device_type()),
        exchanges_(std::move(exchanges)),
        tensors_(std::move(tensors)),
        is_recorded_(CapturedWork::recording_on(stream.device()) != nullptr) {
    end_.record(stream_);
  }
  // Delays the reuse of the tensors if the stream may still use them: after an abort, or if recorded in a graph.
  ~ReductionWork() override {
    if (!is_recorded_ && end_.query()) return;
    for (const at::Tensor& tensor : tensors_) tensor.record_stream(stream_);
  }
  bool isCompleted() override { return exception() != nullptr || end_.query(); }
  // Calls isCompleted() of each exchange, because c10d checks for NCCL's errors in isCompleted().
  std::exception_ptr exception() const override {
    for (const Exchange& exchange : exchanges_)
      if (exchange->isCompleted() && exchange->exception()) return exchange->exception();
    return nullptr;
  }
  // Releases the tensors, because the current stream is ordered after their last use. The thread that destroys this
  // work must not release them: that thread's current stream may be recording then.
  bool wait(std::chrono::milliseconds) override {
    end_.block(current_stream(stream_.device()));
    tensors_.clear();
    return true;
  }
  void synchronize() override { wait({}); }

 private:
  const c10::Stream stream_;
  c10::Event end_;
  const std::vector<Exchange> exchanges_;
  std::vector<at::Tensor> tensors_;
  const bool is_recorded_;
};

// Returns the elements [begin, begin + length) of each shard of a flat tensor, by rank; fewer at the end of a shard.
std::vector<at::Tensor> pieces_of(const at::Tensor& full, const std::vector<int64_t>& counts, int64_t begin,
                                  int64_t length) {
  std::vector<at::Tensor> pieces;
  int64_t offset = 0;
  for (const int64_t count : counts) {
    const int64_t first = std::min(begin, count);
    pieces.push_back(full.narrow(0, offset + first, std::min(length, count - first)));
    offset += count;
  }
  return pieces;
}

// Returns the number of a shard's elements whose received parts and accumulator fit in kStagingBytes; at least 1.
int64_t piece_numel(at::ScalarType dtype, int size) {
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(dtype));
  const auto sum_bytes = static_cast<int64_t>(c10::elementSize(at::toOpMathType(dtype)));
  return std::max<int64_t>(1, RankOrderReduction::kStagingBytes / ((size - 1) * element_bytes + sum_bytes));
}

}  // namespace

bool RankOrderReduction::applies_to(const Collective& collective) {
  const auto kind = collective.kind;
  return (kind == Collective::kReduceScatter || kind == Collective::kAllReduce || kind == Collective::kReduce) &&
         (collective.op == ReduceOp::kSum || collective.op == ReduceOp::kAverage) &&
         at::isFloatingType(collective.dtype());
}

c10::intrusive_ptr<c10d::Work> RankOrderReduction::start(const Collective& collective) {
  const c10::InferenceMode quiet;  // autograd must not record the writes to memory
  const int rank = group_->getRank(), size = group_->getSize();
  const at::Tensor& full = collective.full;
  const bool is_scatter = collective.kind == Collective::kReduceScatter;
  std::vector<int64_t> counts = is_scatter ? collective.counts : even_counts(full.numel(), size);
  if (collective.kind == Collective::kReduce) {  // the root's shard is the whole tensor
    counts.assign(size, 0);
    counts[collective.root] = full.numel();
  }
  const std::vector<at::Tensor> shards = pieces_of(full, counts, 0, full.numel());
  const at::Tensor& out = is_scatter ? collective.shard : shards[rank];
  const int64_t longest = *std::ranges::max_element(counts), step = piece_numel(full.scalar_type(), size);

  if (!stream_)
    stream_ = c10::impl::VirtualGuardImpl(device_.type()).getStreamFromGlobalPool(device_, /*isHighPriority=*/true);
  order_streams(current_stream(device_), *stream_);
  const c10::StreamGuard guard(*stream_);
  std::vector<Exchange> exchanges;
  const auto exchange = [&](std::vector<at::Tensor>& received, std::vector<at::Tensor>& sent) {
    sent[rank] = received[rank] = full.narrow(0, 0, 0);  // a rank sends nothing to itself
    const Exchange started = group_->alltoall(received, sent);
    started->wait();
    exchanges.push_back(backends_.without_tensors(started));  // does not keep this piece's staging memory
  };
  for (int64_t begin = 0; begin < longest; begin += step) {
    std::vector<at::Tensor> sent = pieces_of(full, counts, begin, step);
    const at::Tensor own = sent[rank];
    const at::Tensor staging = at::empty({size - 1, own.numel()}, full.options());
    std::vector<at::Tensor> parts;
    for (int other = 0; other < size; ++other)
      parts.push_back(other == rank ? own : staging[other - (other > rank ? 1 : 0)]);
    exchange(parts, sent);
    parts[rank] = own;
    if (own.numel() > 0) add_in_rank_order(out.narrow(0, begin, own.numel()), parts, collective.op);
  }
  if (collective.kind == Collective::kAllReduce) {
    std::vector<at::Tensor> received = shards, sent(size, shards[rank]);
    exchange(received, sent);
  }
  return c10::make_intrusive<ReductionWork>(*stream_, std::move(exchanges), std::vector<at::Tensor>{full, out});
}

}  // namespace tessera::internal
