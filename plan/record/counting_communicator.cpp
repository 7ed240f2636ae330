#include "plan/record/counting_communicator.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "core/comm/collective.h"
#include "core/comm/shared_memory/shared_rounds_plan.h"
#include "core/comm/traffic.h"
#include "core/runtime/require.h"
#include "plan/record/recorder.h"

namespace tessera::internal {
namespace {

// The name of each operation, in the order of Collective::Kind.
constexpr const char* kOperationNames[] = {"all-gather", "reduce-scatter", "all-reduce", "broadcast",
                                           "reduce",     "scatter",        "all-reduce", "all-to-all"};

char* at_element(const at::Tensor& tensor, int64_t element) {
  return static_cast<char*>(tensor.mutable_data_ptr()) + element * static_cast<int64_t>(tensor.element_size());
}

// Copies this rank's part, `from`, to each rank's part of `to` (of `counts` elements), or as much as fits.
void repeat(const at::Tensor& to, const at::Tensor& from, const std::vector<int64_t>& counts) {
  int64_t begin = 0;
  for (const int64_t count : counts) {
    const auto bytes = static_cast<size_t>(std::min(count, from.numel())) * from.element_size();
    if (bytes > 0) std::memmove(at_element(to, begin), from.const_data_ptr(), bytes);
    begin += count;
  }
}

// Fills `to` with consecutive elements of the concatenated `pieces`, starting at element `begin`.
void copy_part(const at::Tensor& to, const std::vector<at::Tensor>& pieces, int64_t begin) {
  int64_t done = 0;
  for (const at::Tensor& piece : pieces) {
    const int64_t numel = std::min(piece.numel() - begin, to.numel() - done);
    if (numel > 0) to.narrow(0, done, numel).copy_(piece.narrow(0, begin, numel));
    done += std::max<int64_t>(numel, 0);
    begin = std::max<int64_t>(begin - piece.numel(), 0);
  }
}

// If a single rank receives the whole result of a reduce-scatter, returns that rank. Otherwise returns -1.
int only_receiver(const Collective& collective) {
  if (collective.kind != Collective::kReduceScatter || collective.numel == 0) return -1;
  const auto all = std::ranges::find(collective.counts, collective.numel);
  return all == collective.counts.end() ? -1 : static_cast<int>(all - collective.counts.begin());
}

// An operation that is complete at once. finish() only records the wait, because waits limit the predicted overlap.
class WaitedOperation : public AsyncOperation {
 public:
  WaitedOperation(std::shared_ptr<Recorder> recorder, size_t collective)
      : recorder_(std::move(recorder)), collective_(collective) {}
  void finish() override { recorder_->add_wait(collective_); }

 private:
  const std::shared_ptr<Recorder> recorder_;
  const size_t collective_;
};

}  // namespace

std::shared_ptr<CountingCommunicator> CountingCommunicator::make(int rank, int size, int ranks_sharing_memory) {
  require(size >= 1 && rank >= 0 && rank < size, "rank ", rank, " of a world of ", size,
          ", expected 0 to the world's size less 1");
  require(ranks_sharing_memory >= 0, "DryRunOptions::ranks_sharing_memory is ", ranks_sharing_memory,
          ", expected 0 or more");
  return std::shared_ptr<CountingCommunicator>(new CountingCommunicator(rank, size, nullptr, ranks_sharing_memory));
}

CountingCommunicator::CountingCommunicator(int rank, int size, std::shared_ptr<const std::vector<int>> members,
                                           int ranks_sharing_memory)
    : Communicator(rank, size, at::kCPU, std::chrono::minutes(5)),
      members_(std::move(members)),
      ranks_sharing_memory_(ranks_sharing_memory) {
  const auto memory_of = [&](int member) {
    const int in_world = members_ ? (*members_)[static_cast<size_t>(member)] : member;
    return ranks_sharing_memory_ == 0 ? 0 : in_world / ranks_sharing_memory_;
  };
  shares_memory_ = size > 1;
  for (int member = 1; member < size; ++member) shares_memory_ &= memory_of(member) == memory_of(0);
}

// As with gloo: true if all ranks share memory, and the tensor is too large for one round (SharedRoundsPlan).
bool CountingCommunicator::is_lazy(int64_t full_numel) const {
  return shares_memory_ && full_numel > SharedRoundsPlan(size()).most_numel();
}

void CountingCommunicator::abort_this(const std::string& reason) noexcept { aborted_ = reason; }

std::shared_ptr<Communicator> CountingCommunicator::make_part(const std::string&, const std::vector<int>& members,
                                                              int position) {
  if (position < 0) return nullptr;
  std::vector<int> in_world = members;
  if (members_)
    for (int& member : in_world) member = (*members_)[static_cast<size_t>(member)];
  return std::shared_ptr<CountingCommunicator>(
      new CountingCommunicator(position, static_cast<int>(members.size()),
                               std::make_shared<const std::vector<int>>(std::move(in_world)), ranks_sharing_memory_));
}

void CountingCommunicator::require_values(std::string_view what) const {
  throw std::invalid_argument("rank " + std::to_string(rank()) + " of a dry run has no values for " +
                              std::string(what) + "; omit that in the dry run");
}

void CountingCommunicator::fill(const Collective& collective) const {
  const auto kind = collective.kind;
  const at::Tensor &full = collective.full, &shard = collective.shard;
  const auto& counts = collective.counts;
  const auto& pieces = collective.pieces;
  const ReduceOp op = collective.op;
  c10::InferenceMode quiet;
  const int64_t own_begin = counts.empty() ? 0 : std::accumulate(counts.begin(), counts.begin() + rank(), int64_t{0});
  switch (kind) {
    case Collective::kAllGather:
      repeat(full, shard, counts);
      break;
    case Collective::kAllToAll:
      repeat(collective.all_to_all.received, collective.all_to_all.sent, collective.all_to_all.receive_counts);
      break;
    case Collective::kReduceScatter:
    case Collective::kScatter:
      if (!pieces.empty()) {
        copy_part(shard, pieces, own_begin);
      } else if (full.defined() && shard.numel() > 0) {
        std::memmove(shard.mutable_data_ptr(), at_element(full, own_begin), shard.nbytes());
      } else if (Recorder* recorder = Recorder::current(); !full.defined() && recorder != nullptr) {
        recorder->make_void(shard);  // there are no values, because the scatter's root is another rank
      }
      if (kind == Collective::kReduceScatter && op == ReduceOp::kSum) shard.mul_(size());
      break;
    case Collective::kAllReduce:
    case Collective::kBackendAllReduce:
    case Collective::kReduce:
      if (op == ReduceOp::kSum) full.mul_(size());
      break;
    case Collective::kBroadcast:
      break;
  }
}

Pending CountingCommunicator::start(Collective collective) {
  if (!aborted_.empty()) throw CommError(collective.description() + " in a dry run: aborted: " + aborted_);
  const int64_t bytes =
      (collective.kind == Collective::kAllToAll ? collective.all_to_all.received.numel() : collective.numel) *
      static_cast<int64_t>(c10::elementSize(collective.dtype()));
  const std::vector<at::Tensor> tensors{collective.full, collective.shard, collective.all_to_all.received,
                                        collective.all_to_all.sent};
  Recorder* recorder = Recorder::current();
  Pending pending;
  if (recorder != nullptr) {
    RecordedCollective recorded{kOperationNames[collective.kind], collective.what, size(), bytes};
    recorded.members = members_;
    recorded.root = collective.root;
    if (const int only = only_receiver(collective); only >= 0) {
      recorded.operation = kOperationNames[Collective::kReduce];
      recorded.root = only;
    }
    const size_t place = recorder->add_collective(std::move(recorded));
    pending = Pending(std::make_unique<WaitedOperation>(recorder->shared_from_this(), place));
  }
  // Counts a broadcast as one message from the root to each other rank.
  count_sent(bytes_sent(collective, rank(), size()) * (collective.kind == Collective::kBroadcast ? size() - 1 : 1));
  const bool is_void =
      std::ranges::any_of(tensors, &Recorder::is_void) || std::ranges::any_of(collective.pieces, &Recorder::is_void);
  if (!is_void) {
    fill(collective);
  } else if (recorder != nullptr) {
    for (const at::Tensor& tensor : tensors)
      if (tensor.defined()) recorder->make_void(tensor);
  }
  return pending;
}

}  // namespace tessera::internal
