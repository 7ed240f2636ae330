// The NCCL backend, on any c10d::Backend that behaves as ProcessGroupNCCL does.
//
// A group is one NCCL communicator, which runs operations in the order of their start. So all ranks run, say, a gather
// and a reduction in one order. Two orders would deadlock on a GPU that runs one NCCL kernel at a time. wait() orders
// the current stream after the operation, and does not block the host. A thread watches the operations. It aborts the
// group if NCCL reports an error, if an operation times out, or if a peer fails, diverges or is dead. Every later call
// then throws an error with the reason.
#include "core/comm/nccl/nccl_communicator.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <stop_token>
#include <thread>
#include <utility>

#include "core/comm/group_process.h"
#include "core/comm/nccl/nccl_queue.h"
#include "core/comm/nccl/rank_order_reduction.h"
#include "core/comm/recordable_group.h"
#include "core/comm/single_thread_checker.h"
#include "core/comm/store_client.h"
#include "core/comm/store_mailbox.h"
#include "core/comm/traffic.h"
#include "core/comm/watchdog/group_news.h"
#include "core/comm/watchdog/heartbeat.h"
#include "core/comm/watchdog/watchdog.h"
#include "core/runtime/call_with_timeout.h"
#include "core/runtime/graph_recorder.h"
#include "core/runtime/guarded_by.h"
#include "core/runtime/require.h"
#include "core/runtime/run_clock.h"
#include "core/runtime/stream_uses.h"
#include "core/runtime/warn.h"

namespace tessera::internal {
namespace {

using std::chrono::steady_clock;

constexpr auto kLookAfterEvery = std::chrono::milliseconds(50);
constexpr auto kLongestPause = std::chrono::microseconds(1000);  // between polls in require_ended()
// Indexed by ReduceOp.
constexpr c10d::ReduceOp::RedOpType kNcclOps[] = {c10d::ReduceOp::SUM, c10d::ReduceOp::AVG, c10d::ReduceOp::MAX,
                                                  c10d::ReduceOp::MIN};
using Work = c10::intrusive_ptr<c10d::Work>;

// Whether NCCL reports that a peer's process is gone (ncclRemoteError). The error does not name the peer.
bool is_loss_of_a_peer(std::string_view error) {
  return error.find("remote process exit") != std::string_view::npos ||
         error.find("ncclRemoteError") != std::string_view::npos;
}

// The end of replayed work, such as a CUDA graph. The queue tracks it like an operation.
class ReplayEnd final : public c10d::Work {
 public:
  explicit ReplayEnd(at::Device device) : end_(device.type()) { end_.record(current_stream(device)); }
  bool isCompleted() override { return end_.query(); }

 private:
  c10::Event end_;
};

class NcclCommunicator : public Communicator,
                         public HasStore,
                         public RecordableGroup,
                         public std::enable_shared_from_this<NcclCommunicator> {
 public:
  NcclCommunicator(std::shared_ptr<NcclBackends> backends, c10::intrusive_ptr<c10d::Backend> group,
                   c10::intrusive_ptr<c10d::Store> store, int rank, int size, at::Device device, NcclOptions options)
      : Communicator(rank, size, device, options.timeout),
        options_(options),
        backends_(std::move(backends)),
        store_(std::move(store)),
        group_(std::move(group)),
        rank_order_(group_, *backends_, device),
        watch_(c10::make_intrusive<c10d::PrefixStore>(kNcclWatchKeys, store_), rank, size,
               {.interrupt = [this] { end("", false); }},
               {.beat_every = options.beat_every, .serves_store = options.serves_store}) {
    if (size > 1) looks_ = std::jthread([this](const std::stop_token& stop) { look_after_operations(stop); });
  }

  // Blocks until all operations have ended: destroying the group aborts its kernels, and peers may wait for these.
  // During unwinding, aborts the group instead, because its operations may never complete.
  ~NcclCommunicator() override {
    if (std::uncaught_exceptions() > 0) {
      abort_this(kUnwound);
    } else {
      if (size() > 1) queue_.wait_until_empty();
    }
    looks_ = {};  // ends the thread
    const auto end = queue_.wait_for_end();
    if (end && !end->is_told && std::uncaught_exceptions() == 0)
      warn(c10::str("rank ", rank(), " of ", size(), ": ", end->reason,
                    "; no call has told so: what was read of the device since may be wrong"));
    if (end) return;
    watch_.leave();
    if (options_.is_borrowed) return;
    try {
      group_->shutdown();
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): all operations have completed, so none is lost
    }
  }

  const c10::intrusive_ptr<c10d::Store>& store() const override { return store_; }

  // Allocates from the group's pool in c10d, whose memory is allocated by ncclMemAlloc() and registered with NCCL.
  at::Tensor buffer(int64_t numel, at::ScalarType dtype) override {
    if (!options_.registered_memory || size() == 1 || numel == 0) return Communicator::buffer(numel, dtype);
    return group_->allocateTensor(numel, at::TensorOptions().dtype(dtype).device(device()));
  }

  std::string why_not_recorded() const override {
    if (!options_.registered_memory || size() == 1) return "";
    return "with InitOptions::registered_memory units are gathered into memory of the group, which recorded work "
           "cannot own: leave the option off";
  }
  void enqueue_recorded(const std::string& description, const std::function<void()>& enqueue) override {
    require_whole(description);
    enqueue();
    track(c10::make_intrusive<ReplayEnd>(device()), description);
  }
  // Lets this group and those split from it track the end of a replay, which may contain kernels of each. If the replay
  // stalls, only a group's own thread can abort the group's kernels.
  void track(const Work& end, const std::string& description) {
    if (size() == 1) return;
    watch_.started(sequence_++, description);
    queue_.push(end, description);
    for (const auto& part : parts())
      if (auto* const of_nccl = dynamic_cast<NcclCommunicator*>(part.get())) of_nccl->track(end, description);
  }

  void abort_this(const std::string& reason) noexcept override {
    if (!process_.is_this()) return;
    watch_.publish_failure(reason);
    end("this rank left the group: " + reason, true);
  }

  // Orders the current stream after `work`. Throws CommError if the group has ended.
  void wait_for(const Work& work, const std::string& description) {
    const auto began = steady_clock::now();
    require_whole(description);
    try {
      work->wait();
    } catch (const std::exception& error) {
      require_whole_after(error, description);
      throw CommError(c10::str(description, " failed on rank ", rank(), ": ", error.what()));
    }
    count_wait(steady_clock::now() - began, description);
  }

 protected:
  std::shared_ptr<Communicator> make_part(const std::string& name, const std::vector<int>& members,
                                          int position) override {
    auto store = c10::make_intrusive<c10d::PrefixStore>(name, store_);
    // Needs a timeout, because split() waits for all ranks, also for dead ones.
    auto group = call_with_timeout(timeout() + kAnswerGrace, [backends = backends_, group = group_, store, members,
                                                              timeout = timeout(), device = device()] {
      c10::DeviceGuard guard(device);
      return backends->split(*group, store, members, timeout);
    });
    require<CommError>(group.has_value(), "rank ", rank(), " of ", size(),
                       " could not split the NCCL group: not all of its ranks ", "have come within ",
                       timeout().count() / 1000, " s");
    if (position < 0) return nullptr;
    NcclOptions options = options_;
    options.is_borrowed = false;  // no other group uses the backend that split() made, so the part shuts it down
    return make_group<NcclCommunicator>(backends_, std::move(*group), std::move(store), position,
                                        static_cast<int>(members.size()), device(), options);
  }
  Pending start(Collective collective) override;
  void require_ended(std::string_view what, bool all) override;

 private:
  void make_sendable(Collective& collective) const;
  Work launch(Collective& collective);
  Work launch_scatter(Collective& collective);
  void require_whole(std::string_view what);
  void require_whole_after(const std::exception& error, std::string_view what);
  void look_after_operations(const std::stop_token& stop);
  void end_by(const std::string& error);
  void end(std::string reason, bool is_complete) noexcept;

  const GroupProcess process_;
  const NcclOptions options_;
  // The longest time from NCCL's report of a lost peer until the watchdog names the peer's rank.
  const RunClock::duration naming_time_ = Heartbeat::kBeatsMissed * options_.beat_every + std::chrono::seconds(3);
  const std::shared_ptr<NcclBackends> backends_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const c10::intrusive_ptr<c10d::Backend> group_;
  RankOrderReduction rank_order_;
  NcclQueue queue_;
  uint64_t sequence_ = 0;
  Watchdog watch_;
  std::jthread looks_;  // last member, because the thread uses the others
};

class NcclOperation : public Pending::Operation {
 public:
  NcclOperation(std::shared_ptr<NcclCommunicator> comm, Work work, std::string description,
                std::vector<at::Tensor> tensors)
      : comm_(std::move(comm)),
        work_(std::move(work)),
        description_(std::move(description)),
        tensors_(std::move(tensors)) {}

  void finish() override {
    comm_->wait_for(work_, description_);
    tensors_.clear();  // safe, because the current stream is now ordered after their last use
  }

 private:
  const std::shared_ptr<NcclCommunicator> comm_;
  const Work work_;
  const std::string description_;
  std::vector<at::Tensor> tensors_;
};

// Views tensors as bytes if NCCL does not know their dtype; for a reduction, throws std::invalid_argument instead.
void NcclCommunicator::make_sendable(Collective& collective) const {
  const auto kind = collective.kind;
  const at::ScalarType dtype = collective.dtype();
  constexpr at::ScalarType kTypes[] = {at::kByte, at::kChar,     at::kInt,   at::kLong,
                                       at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};
  if (std::ranges::find(kTypes, dtype) != std::end(kTypes)) return;
  require(kind != Collective::kAllReduce && kind != Collective::kReduce && kind != Collective::kReduceScatter &&
              kind != Collective::kBackendAllReduce,
          collective.description(), " on rank ", rank(), ": the tensor is ",
          dtype == at::kShort ? "int16" : c10::toString(dtype), ", which NCCL cannot add: convert it, to int32 say");
  for (at::Tensor* tensor :
       {&collective.full, &collective.shard, &collective.all_to_all.received, &collective.all_to_all.sent})
    if (tensor->defined()) *tensor = tensor->view(at::kByte);
  for (auto* elements : {&collective.counts, &collective.all_to_all.receive_counts, &collective.all_to_all.send_counts})
    for (int64_t& count : *elements) count *= static_cast<int64_t>(c10::elementSize(dtype));
}

Pending NcclCommunicator::start(Collective collective) {
  make_sendable(collective);
  // If ranks have different options, their descriptions differ, and the watchdog reports the difference.
  const bool in_rank_order = options_.rank_order_sums && RankOrderReduction::applies_to(collective);
  const std::string description = c10::str(collective.description(), in_rank_order ? " in rank order" : "",
                                           collective.details(), label().empty() ? "" : " in the group of ", label());
  const SingleThreadChecker::Call call(single_thread_checker());
  if (!call.is_alone()) refuse_second_thread(*this, description);
  require_whole(description);
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& tensor :
       {collective.full, collective.shard, collective.all_to_all.received, collective.all_to_all.sent})
    if (tensor.defined()) tensors.push_back(tensor);
  Work work;
  try {
    c10::DeviceGuard guard(device());
    work = in_rank_order ? rank_order_.start(collective) : launch(collective);
  } catch (const std::exception& error) {
    require_whole_after(error, description);
    throw CommError(c10::str(description, " failed on rank ", rank(), ": ", error.what()));
  }
  count_sent(bytes_sent(collective, rank(), size()));
  if (CapturedWork* const recorded = CapturedWork::recording_on(device())) {
    // Events of recorded work cannot be queried, so the queue tracks the end of each replay instead.
    recorded->add_collective(collective.description() + collective.details());
  } else {
    watch_.started(sequence_++, description);
    queue_.push(backends_->without_tensors(work), description);
  }
  return Pending(std::make_unique<NcclOperation>(shared_from_this(), std::move(work), description, std::move(tensors)));
}

Work NcclCommunicator::launch(Collective& collective) {
  const auto kind = collective.kind;
  const int root = collective.root;
  at::Tensor &full = collective.full, &shard = collective.shard;
  const auto& counts = collective.counts;
  const c10d::ReduceOp nccl_op = kNcclOps[static_cast<size_t>(collective.op)];
  const bool is_even = std::ranges::adjacent_find(counts, std::not_equal_to<>()) == counts.end();
  std::vector<std::vector<at::Tensor>> parts;  // parts of `full`, if counts are uneven
  if (!is_even && kind != Collective::kScatter) parts.push_back(full.split_with_sizes(counts));
  std::vector<at::Tensor> own{shard.defined() ? shard : full};
  switch (kind) {
    case Collective::kAllGather:
      return is_even ? group_->_allgather_base(full, shard) : group_->allgather(parts, own);
    case Collective::kReduceScatter:
      return is_even ? group_->_reduce_scatter_base(shard, full, {.reduceOp = nccl_op})
                     : group_->reduce_scatter(own, parts, {.reduceOp = nccl_op});
    case Collective::kAllReduce:
    case Collective::kBackendAllReduce:
      return group_->allreduce(own, {.reduceOp = nccl_op});
    case Collective::kBroadcast:
      return group_->broadcast(own, {.rootRank = root});
    case Collective::kReduce:  // NCCL leaves the other ranks' tensors unchanged
      return group_->reduce(own, {.reduceOp = nccl_op, .rootRank = root});
    case Collective::kScatter:
      return launch_scatter(collective);
    case Collective::kAllToAll:
      return group_->alltoall_base(collective.all_to_all.received, collective.all_to_all.sent,
                                   collective.all_to_all.receive_counts, collective.all_to_all.send_counts);
  }
  throw std::invalid_argument("unknown operation");
}

// Uses an all-to-all in which only the root sends, because ProcessGroupNCCL::scatter() requires even parts.
Work NcclCommunicator::launch_scatter(Collective& collective) {
  at::Tensor from = collective.full.defined() ? collective.full : at::empty({0}, collective.shard.options());
  std::vector<int64_t> sent(size(), 0), received(size(), 0);
  if (rank() == collective.root) sent = collective.counts;
  received[collective.root] = collective.shard.numel();
  return group_->alltoall_base(collective.shard, from, received, sent);
}

// ---- failures -----------------------------------------------------------------------------------

void NcclCommunicator::require_whole(std::string_view what) {
  process_.require_this(what);
  if (const auto reason = queue_.reason_to_tell()) throw CommError(c10::str(what, " on rank ", rank(), ": ", *reason));
}

// Called after an error of c10d. Throws if the group has ended. If a peer was lost, waits for the end, up to
// naming_time_.
void NcclCommunicator::require_whole_after(const std::exception& error, std::string_view what) {
  require_whole(what);
  if (!is_loss_of_a_peer(error.what())) return;
  watch_.begin_wait();
  for (const auto began = RunClock::now(); RunClock::now() - began < naming_time_;) {
    std::this_thread::sleep_for(kLookAfterEvery);
    require_whole(what);
  }
}

// An aborted operation counts as complete, so the group must be checked before the result is used.
void NcclCommunicator::require_ended(std::string_view what, bool all) {
  if (CapturedWork::recording_on(device())) return require_whole(what);  // a recording must not query events
  const auto began = steady_clock::now();
  std::string waits_for;
  for (auto pause = std::chrono::microseconds(20);; pause = std::min(2 * pause, kLongestPause)) {
    const auto look = queue_.look();
    const bool is_over = !look.ends && look.error.empty() && (!look.oldest || !all);
    if (waits_for.empty() && look.oldest) waits_for = look.oldest->description;
    require_whole(what);
    if (is_over) break;
    if (!look.error.empty() && !is_loss_of_a_peer(look.error))
      end_by(look.error);
    else
      std::this_thread::sleep_for(pause);
  }
  if (!waits_for.empty()) count_wait(steady_clock::now() - began, waits_for);
}

// Ends the group. Prefers the watchdog's explanation to `error`, because NCCL's errors do not name a failed peer.
void NcclCommunicator::end_by(const std::string& error) {
  const std::string known = watch_.explanation();
  end(known.empty() ? error : known, false);
}

void NcclCommunicator::look_after_operations(const std::stop_token& stop) {
  make_current(device());
  uint64_t waits_for = static_cast<uint64_t>(-1);
  std::optional<RunClock::time_point> lost_since;  // when NCCL reported the loss of a peer that it does not name
  int silent_looks = 0;                            // successive looks without the store's answer; one may be a delay
  while (queue_.sleep(stop, kLookAfterEvery)) {
    const auto look = queue_.look();
    const bool waits = look.oldest && !look.ends;
    const bool is_late = waits && RunClock::now() - look.oldest->began > timeout();
    const bool is_new = waits && waits_for != look.ended_count;
    const auto unanswered = watch_.unanswered();
    silent_looks = waits && unanswered > Heartbeat::kBeatsMissed * options_.beat_every ? silent_looks + 1 : 0;
    if (waits) waits_for = look.ended_count;
    const bool is_loss = waits && is_loss_of_a_peer(look.error);
    if (is_loss && !lost_since) {
      lost_since = RunClock::now();
      watch_.begin_wait();
    } else if (is_loss && RunClock::now() - *lost_since < naming_time_) {
      // Does nothing yet, because a published reason or missing heartbeats may name the lost peer.
    } else if (!look.error.empty() && waits) {
      end_by(look.error);
    } else if (silent_looks > 4) {
      end(c10::str("the store, in rank 0's process, has not answered for ", unanswered.count() / 1000,
                   " s: that process has stopped, or its host is gone"),
          false);
    } else if (is_late) {
      end(c10::str("timed out after ", static_cast<double>(timeout().count()) * 1e-3, " s; ", watch_.waiting_ranks()),
          false);
    } else if (is_new) {
      watch_.begin_wait();
    } else if (!waits) {
      watch_.end_wait();
    }
    queue_.notify();
  }
}

// Ends the group. Only the first call has an effect. An empty `reason`, which the watchdog passes, means explanation().
// Unless the reason `is_complete`, adds the oldest operation to it, as the one that failed.
void NcclCommunicator::end(std::string reason, bool is_complete) noexcept {
  if (reason.empty()) reason = watch_.explanation();
  const auto oldest = queue_.begin_end();
  if (!oldest) return;
  if (!is_complete) reason = c10::str(*oldest, " failed on rank ", rank(), " of ", size(), ": ", reason);
  // Must precede complete_end(), after which this rank's thread may throw and end the process that serves the store.
  watch_.publish_failure(reason);
  watch_.await_readers();
  queue_.complete_end(is_complete ? reason : "the group is broken since: " + reason, /*is_told=*/is_complete);
  try {
    group_->abort();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the group has ended even if abort() failed
  }
}

}  // namespace

std::shared_ptr<Communicator> make_nccl_communicator(std::shared_ptr<NcclBackends> backends,
                                                     c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                                     at::Device device, NcclOptions options) {
  require(device.is_cuda() && device.has_index(), "rank ", rank, ": the NCCL backend was given device ", device,
          ", expected a CUDA device with an index");
  store = StoreClient::of(std::move(store), options.timeout);
  c10::intrusive_ptr<c10d::Backend> group;
  try {
    auto made = call_with_timeout(options.timeout + kAnswerGrace, [=] {
      c10::DeviceGuard guard(device);
      return backends->make(c10::make_intrusive<c10d::PrefixStore>("nccl", store), rank, size, device, options.timeout);
    });
    require<std::runtime_error>(made.has_value(), "not all of its ranks have come within ",
                                options.timeout.count() / 1000, " s");
    group = std::move(*made);
  } catch (const std::exception& error) {
    throw CommError(
        c10::str("rank ", rank, " of ", size, " on ", device, " could not join the NCCL group: ", error.what()));
  }
  auto comm = make_group<NcclCommunicator>(std::move(backends), group, std::move(store), rank, size, device, options);
  if (options.registered_memory && size > 1 && !group->supportsTensorAlloc(device.index()))
    throw std::invalid_argument(c10::str("rank ", rank, ": InitOptions::registered_memory on ", device,
                                         ": its driver, or this NCCL, has no memory that is registered with a group "
                                         "(ncclMemAlloc since 2.19, and multicast): leave it off"));
  return comm;
}

static std::mutex chosen_backends_mutex;
static std::shared_ptr<NcclBackends> chosen_backends TESSERA_GUARDED_BY(chosen_backends_mutex);

void set_nccl_backends(std::shared_ptr<NcclBackends> backends) {
  std::lock_guard lock(chosen_backends_mutex);
  chosen_backends = std::move(backends);
}

std::shared_ptr<Communicator> make_nccl_communicator(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                                     at::Device device, NcclOptions options) {
  std::shared_ptr<NcclBackends> backends;
  {
    std::lock_guard lock(chosen_backends_mutex);
    backends = chosen_backends;
  }
  if (!backends) backends = nccl_backends();
  require(backends != nullptr, "rank ", rank, ": the NCCL backend for ", device,
          " is not in this build of Tessera: configure with -DTESSERA_CUDA=ON (preset cuda)");
  return make_nccl_communicator(std::move(backends), std::move(store), rank, size, device, options);
}

}  // namespace tessera::internal
