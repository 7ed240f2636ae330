#include "core/comm/guest/guest_transports.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <tessera/errors.h>
#include "core/comm/gloo/reduction_pipeline.h"
#include "core/comm/group_process.h"
#include "core/comm/guest/transport_source.h"
#include "core/comm/traffic.h"
#include "core/runtime/run_clock.h"
#include "core/runtime/sigpipe_block.h"

namespace tessera::internal {
namespace {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using Work = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;
using std::chrono::milliseconds;

// Whether an error means that the class of the group lacks an operation.
bool is_missing(const std::string& error) {
  constexpr const char* kTexts[] = {"does not support", "not supported",          "nsupported",
                                    "ot implemented",   "missing implementation", "does not implement"};
  return std::ranges::any_of(kTexts, [&](const char* text) { return error.find(text) != std::string::npos; });
}

// Awaits the c10d::Work objects of one message or collective, in order, and then calls `complete`.
class WorkMessage : public TransportMessage {
 public:
  WorkMessage(std::vector<Work> works, Tensors tensors, std::function<void()> complete, int peer, bool is_send)
      : TransportMessage(peer, is_send),
        works_(std::move(works)),
        tensors_(std::move(tensors)),
        complete_(std::move(complete)) {}

  std::optional<MessageFailure> wait(Deadline until) override {
    for (const Work& work : works_)
      if (auto failed = wait_for(work, until)) return failed;
    if (complete_) complete_();
    return std::nullopt;
  }
  void prepare_wait() override { is_interrupted_ = false; }
  void interrupt() noexcept override {
    is_interrupted_ = true;
    for (const Work& work : works_) {
      try {
        work->abort();
      } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): most works cannot be aborted; wait() polls
      }
    }
  }
  at::Tensor exposed_tensor() const override { return tensors_.empty() ? at::Tensor() : tensors_.front(); }

 private:
  static constexpr milliseconds kSlice{250};  // the interval at which a wait checks for interrupts

  // Waits for a collective's work in slices, because most classes of works have no abort(). Waits for works of send()
  // and recv() without slices: these have abort(), and the timeout of a slice would end gloo's connection.
  std::optional<MessageFailure> wait_for(const Work& work, Deadline until) {
    for (;;) {
      if (is_interrupted_) return failure("");
      const auto left = std::max(std::chrono::duration_cast<milliseconds>(until - RunClock::now()), milliseconds(1));
      const bool is_sliced = peer() < 0 && left > kSlice;
      try {
        return work->wait(is_sliced ? kSlice : left) ? std::nullopt : std::optional(failure(""));
      } catch (const std::exception&) {
        const std::string error = text_of(std::current_exception());
        const bool goes_on = is_sliced && !work->isCompleted() && error.find("imed out") != std::string::npos;
        if (!goes_on) return failure(is_interrupted_ ? "" : error);
      }
    }
  }

  const std::vector<Work> works_;
  const Tensors tensors_;
  const std::function<void()> complete_;
  std::atomic<bool> is_interrupted_ = false;
};

// The state that transports of one process group share.
struct SharedByParts {
  // Whether the group's class has _allgather_base and _reduce_scatter_base: true until a call fails, on all ranks.
  std::atomic<bool> gathers = true, scatters = true;
  std::mutex posting;  // serializes calls of the process group; a part's PipelineThread calls it, too
};

class ProcessGroupTransport : public Transport {
 public:
  ProcessGroupTransport(ProcessGroupPtr group, std::shared_ptr<SharedByParts> shared, PartOfGroup part)
      : group_(std::move(group)), shared_(std::move(shared)), part_(std::move(part)) {}

  bool reaches(int /*peer*/) const override { return true; }
  int64_t max_eager_numel() const override { return std::numeric_limits<int64_t>::max(); }
  bool carries(const Collective& collective) const override {
    return part_.members.empty() && collective.numel > 0 && collective.kind != Collective::kAllToAll;
  }

  void start(const at::Tensor& tensor, int peer, bool is_send, const MessageTag& tag,
             TransportMessages& started) override {
    const int other = part_.rank_of(peer);
    const auto number = static_cast<int>(part_.number_of(tag) & 0x7fffffff);
    for (const at::Tensor& chunk : chunks_of(tensor)) {
      Tensors tensors{chunk};
      std::lock_guard lock(shared_->posting);
      const SigpipeBlock no_sigpipe;
      Work work = is_send ? group_->send(tensors, other, number) : group_->recv(tensors, other, number);
      started.push_back(std::make_shared<WorkMessage>(std::vector{std::move(work)}, tensors, nullptr, peer, is_send));
    }
  }

  StartedCollective start_collective(const Collective& collective, const MessageTag& /*tag*/) override {
    const SigpipeBlock no_sigpipe;
    std::lock_guard lock(shared_->posting);
    Started started = start_kind(collective);
    if (collective.op == ReduceOp::kAverage && started.result.defined())
      started.complete = [then = std::move(started.complete), result = started.result, size = group_->getSize()] {
        if (then) then();
        at::Tensor(result).div_(size);
      };
    return {std::make_shared<WorkMessage>(std::move(started.works), std::move(started.tensors),
                                          std::move(started.complete), /*peer=*/-1, /*is_send=*/true),
            bytes_sent(collective, group_->getRank(), group_->getSize())};
  }

  // The process group cannot cancel an operation.
  bool withdraw() noexcept override { return false; }

 private:
  struct Started {
    std::vector<Work> works;
    Tensors tensors;                 // tensors that the works use; the first one is written
    std::function<void()> complete;  // called after the works; may be null
    at::Tensor result;               // result of a reduction on this rank; otherwise undefined
  };

  Tensors parts_of(const at::Tensor& full, const Collective& collective) const {
    return full.split_with_sizes(collective.counts);
  }
  static c10d::ReduceOp op_of(const Collective& collective) {
    constexpr c10d::ReduceOp::RedOpType kOps[] = {c10d::ReduceOp::SUM, c10d::ReduceOp::SUM, c10d::ReduceOp::MAX,
                                                  c10d::ReduceOp::MIN};
    return kOps[static_cast<size_t>(collective.op)];
  }
  static bool is_even(const Collective& collective) {
    const auto& counts = collective.counts;
    return std::ranges::adjacent_find(counts, std::not_equal_to<>()) == counts.end();
  }

  // Returns the result of `start`. If the group's class lacks the operation, returns null, now and in all later calls.
  template <class Start>
  static Work try_to(std::atomic<bool>& is_able, Start start) {
    if (!is_able) return {};
    try {
      return start();
    } catch (const std::exception&) {
      if (!is_missing(text_of(std::current_exception()))) throw;
      is_able = false;
      return {};
    }
  }

  Work all_reduce(const at::Tensor& tensor, const Collective& collective) const {
    Tensors tensors{tensor};
    return group_->allreduce(tensors, {.reduceOp = op_of(collective)});
  }
  Work broadcast(const at::Tensor& tensor, int root) const {
    Tensors tensors{tensor};
    return group_->broadcast(tensors, {.rootRank = root});
  }

  Started start_kind(const Collective& collective) const {
    const at::Tensor &full = collective.full, &shard = collective.shard;
    switch (collective.kind) {
      case Collective::kAllReduce:
      case Collective::kBackendAllReduce:
        return {{all_reduce(full, collective)}, {full}, nullptr, full};
      case Collective::kBroadcast:
        return {{broadcast(full, collective.root)}, {full}, nullptr, {}};
      case Collective::kReduce: {
        const at::Tensor copy = full.clone();
        if (group_->getRank() != collective.root) return {{all_reduce(copy, collective)}, {copy}, nullptr, {}};
        return {{all_reduce(copy, collective)}, {copy}, [full, copy] { full.copy_(copy); }, full};
      }
      case Collective::kAllGather:
        return gather(collective);
      case Collective::kReduceScatter:
        return reduce_scatter(collective);
      case Collective::kScatter: {
        const at::Tensor all = full.defined() ? full : at::empty({collective.numel}, shard.options());
        return {{broadcast(all, collective.root)}, {all}, [=, this] { take_own(all, collective); }, {}};
      }
      case Collective::kAllToAll:
        break;
    }
    throw std::logic_error("no collective of a process group");
  }

  void take_own(const at::Tensor& full, const Collective& collective) const {
    const at::Tensor own = parts_of(full, collective)[static_cast<size_t>(group_->getRank())];
    if (own.numel() > 0 && own.const_data_ptr() != collective.shard.const_data_ptr()) collective.shard.copy_(own);
  }

  Started gather(const Collective& collective) const {
    const at::Tensor& full = collective.full;
    if (is_even(collective)) {
      at::Tensor own = collective.shard.is_alias_of(full) ? collective.shard.clone() : collective.shard, all = full;
      if (Work work = try_to(shared_->gathers, [&] { return group_->_allgather_base(all, own); }))
        return {{std::move(work)}, {full, own}, nullptr, {}};
    }
    const Tensors parts = parts_of(full, collective);
    const at::Tensor& own = parts[static_cast<size_t>(group_->getRank())];
    if (own.numel() > 0 && own.const_data_ptr() != collective.shard.const_data_ptr()) own.copy_(collective.shard);
    Started started{{}, {full}, nullptr, {}};
    for (size_t root = 0; root < parts.size(); ++root)
      if (parts[root].numel() > 0) started.works.push_back(broadcast(parts[root], static_cast<int>(root)));
    return started;
  }

  Started reduce_scatter(const Collective& collective) const {
    at::Tensor full = collective.pieces.empty() ? collective.full : at::cat(collective.pieces);
    if (is_even(collective)) {
      const bool is_apart = !collective.shard.is_alias_of(full);
      at::Tensor out = is_apart ? collective.shard : at::empty_like(collective.shard);
      std::function<void()> keep;
      if (!is_apart) keep = [out, shard = collective.shard] { shard.copy_(out); };
      if (Work work = try_to(shared_->scatters,
                             [&] { return group_->_reduce_scatter_base(out, full, {.reduceOp = op_of(collective)}); }))
        return {{std::move(work)}, {out, full}, keep, collective.shard};
    }
    return {{all_reduce(full, collective)}, {full}, [=, this] { take_own(full, collective); }, collective.shard};
  }

  const ProcessGroupPtr group_;
  const std::shared_ptr<SharedByParts> shared_;
  const PartOfGroup part_;
};

// Returns the sum of all ranks' tensors, in host memory.
at::Tensor sum_in_time(c10d::ProcessGroup& group, const at::Tensor& tensor, at::Device device, milliseconds timeout) {
  Tensors tensors{tensor.to(device)};
  const auto until = RunClock::now() + timeout;
  try {
    group.allreduce(tensors)->wait(timeout);
  } catch (const std::exception&) {
    if (RunClock::now() < until) throw;
    throw CommError(c10::str("not all ranks of the process group have called it within ",
                             static_cast<double>(timeout.count()) * 1e-3, " s"));
  }
  return tensors[0].cpu();
}

}  // namespace

std::shared_ptr<TransportSource> process_group_transports(c10::intrusive_ptr<c10d::ProcessGroup> group) {
  return std::make_shared<TransportSource>(
      [group = std::move(group), shared = std::make_shared<SharedByParts>()](const PartOfGroup& part) {
        return std::make_unique<ProcessGroupTransport>(group, shared, part);
      });
}

TextExchange exchange_over(const c10::intrusive_ptr<c10d::ProcessGroup>& group, at::Device device,
                           milliseconds timeout) {
  return [group, device, timeout](const std::string& own) {
    const int rank = group->getRank(), size = group->getSize();
    const auto sum = [&](const at::Tensor& tensor) { return sum_in_time(*group, tensor, device, timeout); };
    const at::TensorOptions options(at::kCPU);
    at::Tensor lengths = at::zeros({size}, options.dtype(at::kLong));
    lengths[rank].fill_(static_cast<int64_t>(own.size()));
    lengths = sum(lengths);
    const auto* const length = lengths.const_data_ptr<int64_t>();
    // Each rank writes its text into its own bytes of a zero tensor, so that the sum contains the texts of all ranks.
    // The dtype is int32, which every backend can add.
    const auto words_of = [](int64_t count) { return count / 4 + 1; };
    int64_t total = 0, begin = 0;
    for (int r = 0; r < size; ++r) {
      if (r == rank) begin = total;
      total += words_of(length[r]);
    }
    at::Tensor bytes = at::zeros({total}, options.dtype(at::kInt));
    std::memcpy(bytes.mutable_data_ptr<int>() + begin, own.data(), own.size());
    bytes = sum(bytes);
    std::vector<std::string> texts;
    const int* word = bytes.const_data_ptr<int>();
    for (int r = 0; r < size; word += words_of(length[r++]))
      texts.emplace_back(reinterpret_cast<const char*>(word), static_cast<size_t>(length[r]));
    return texts;
  };
}

}  // namespace tessera::internal
