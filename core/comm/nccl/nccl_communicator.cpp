// The NCCL backend, on any c10d::Backend that behaves as ProcessGroupNCCL does.
//
// A group is one communicator, on which operations run in the order in which they were started. So gathers and
// reductions never wait for each other in different orders on two ranks, which would be a deadlock on a GPU that runs
// one kernel of NCCL's at a time; gloo numbers the operations of a group in the same way. Waiting orders the current
// stream after the operation and does not stop the host. What is under way is looked after by a thread: an error of
// NCCL's, a peer that failed, has gone another way, does not come or is dead ends it by abort(), after which each call
// throws the reason.
#include "core/comm/nccl/nccl_communicator.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <stop_token>
#include <thread>
#include <utility>

#include "core/comm/backends.h"
#include "core/comm/group_process.h"
#include "core/comm/notes.h"
#include "core/comm/watchdog/stall_watch.h"
#include "core/runtime/in_time.h"

namespace tessera::internal {
namespace {

using std::chrono::steady_clock;

constexpr auto kLookAfterEvery = std::chrono::milliseconds(50);
constexpr auto kLongestPause = std::chrono::microseconds(1000);  // between looks of a thread that waits for all
// By ReduceOp.
constexpr c10d::ReduceOp::RedOpType kNcclOps[] = {c10d::ReduceOp::SUM, c10d::ReduceOp::AVG, c10d::ReduceOp::MAX,
                                                  c10d::ReduceOp::MIN};
using Work = c10::intrusive_ptr<c10d::Work>;

// Why it failed; "" for one that did not, or has not ended.
std::string error_of(const c10d::Work& work) {
  const std::exception_ptr exception = work.exception();
  return exception ? text_of(exception) : "";
}

class NcclCommunicator : public Communicator, public HasStore, public std::enable_shared_from_this<NcclCommunicator> {
 public:
  NcclCommunicator(std::shared_ptr<NcclBackends> backends, c10::intrusive_ptr<c10d::Backend> group,
                   c10::intrusive_ptr<c10d::Store> store, int rank, int size, at::Device device, NcclOptions options)
      : Communicator(rank, size, device, options.timeout),
        options_(options),
        backends_(std::move(backends)),
        store_(std::move(store)),
        group_(std::move(group)),
        watch_(c10::make_intrusive<c10d::PrefixStore>("watch", store_), rank, size,
               {.interrupt = [this] { end("", false); }},
               {.beat_every = options.beat_every, .serves_store = options.serves_store}) {
    if (size > 1) looks_ = std::jthread([this](const std::stop_token& stop) { look_after_operations(stop); });
  }

  // What is under way must end before the group does: c10d aborts a group that is destroyed, and with it the kernels
  // that the peers count on. Where an exception unwinds, the peers' operations would wait for ones that never come.
  ~NcclCommunicator() override {
    if (std::uncaught_exceptions() > 0) {
      abort_this(kUnwound);
    } else {
      wait_for_operations();
    }
    looks_ = {};  // ends the thread
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !ends_ || broken_; });
    if (broken_ && !is_told_ && std::uncaught_exceptions() == 0)
      std::fprintf(stderr,
                   "tessera: rank %d of %d: %s; no call has told so: what was read of the device since may be wrong\n",
                   rank(), size(), broken_->c_str());
    if (broken_) return;
    lock.unlock();
    watch_.leave();
    try {
      group_->shutdown();
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the group has gone by itself
    }
  }

  const c10::intrusive_ptr<c10d::Store>& store() const override { return store_; }

  // Of a pool that c10d keeps for the group: made by ncclMemAlloc(), and known to the communicator.
  at::Tensor buffer(int64_t numel, at::ScalarType dtype) override {
    if (!options_.registered_memory || size() == 1 || numel == 0) return Communicator::buffer(numel, dtype);
    return group_->allocateTensor(numel, at::TensorOptions().dtype(dtype).device(device()));
  }

  void abort_this(const std::string& reason) noexcept override {
    if (!process_.is_this()) return;
    watch_.publish_failure(reason);
    end("this rank left the group: " + reason, true);
  }

  // Throws if the group has ended.
  void wait_for(const Work& work, const std::string& description) {
    const auto began = steady_clock::now();
    require_whole(description);
    try {
      work->wait();
    } catch (const std::exception& error) {
      require_whole(description);
      throw CommError(c10::str(description, " failed on rank ", rank(), ": ", error.what()));
    }
    count_wait(steady_clock::now() - began, description);
  }

 protected:
  std::shared_ptr<Communicator> make_part(const std::string& name, const std::vector<int>& members,
                                          int position) override {
    auto store = c10::make_intrusive<c10d::PrefixStore>(name, store_);
    // Its ranks wait for each other there, and for those that have died as well.
    auto group = in_time(timeout() + kAnswerGrace, [backends = backends_, group = group_, store, members,
                                                    timeout = timeout(), device = device()] {
      c10::DeviceGuard guard(device);
      return backends->split(*group, store, members, timeout);
    });
    if (!group)
      throw CommError(c10::str("rank ", rank(), " of ", size(),
                               " could not split the NCCL group: not all of its ranks ", "have come within ",
                               timeout().count() / 1000, " s"));
    if (position < 0) return nullptr;
    return make_group<NcclCommunicator>(backends_, std::move(*group), std::move(store), position,
                                        static_cast<int>(members.size()), device(), options_);
  }
  Pending start(Collective collective) override;
  void require_ended(std::string_view what, bool all) override;

 private:
  struct UnderWay {
    Work work;
    std::string description;
    steady_clock::time_point began;
  };

  int64_t sent_bytes(const Collective& collective) const;
  void make_sendable(Collective& collective) const;
  Work launch(Collective& collective);
  Work launch_scatter(Collective& collective);
  void require_whole(std::string_view what);
  std::string take_ended(std::deque<UnderWay>& over);
  void look_after_operations(const std::stop_token& stop);
  void wait_for_operations();
  void end_by(const std::string& error);
  void end(std::string reason, bool is_complete) noexcept;

  const GroupProcess process_;
  const NcclOptions options_;
  const std::shared_ptr<NcclBackends> backends_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const c10::intrusive_ptr<c10d::Backend> group_;
  std::mutex mutex_;  // guards what follows, to sequence_
  std::condition_variable_any changed_;
  bool ends_ = false;  // and broken_ soon
  std::optional<std::string> broken_;
  bool is_told_ = false;            // by an exception, or this rank knows by itself
  std::deque<UnderWay> under_way_;  // the oldest first
  uint64_t ended_ = 0;              // how many were taken from there
  uint64_t sequence_ = 0;
  StallWatch watch_;
  std::jthread looks_;  // last: it uses the rest
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
    tensors_.clear();  // the current stream is ordered after their last use
  }

 private:
  const std::shared_ptr<NcclCommunicator> comm_;
  const Work work_;
  const std::string description_;
  std::vector<at::Tensor> tensors_;
};

// What only moves travels as bytes where NCCL has no type for it; sums need a type.
void NcclCommunicator::make_sendable(Collective& collective) const {
  auto& [kind, full, shard, what, counts, op, root, send_counts, numel, pieces] = collective;
  const at::ScalarType dtype = (full.defined() ? full : shard).scalar_type();
  constexpr at::ScalarType kTypes[] = {at::kByte, at::kChar,     at::kInt,   at::kLong,
                                       at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};
  if (std::ranges::find(kTypes, dtype) != std::end(kTypes)) return;
  if (kind == Collective::kAllReduce || kind == Collective::kReduce || kind == Collective::kReduceScatter ||
      kind == Collective::kBackendAllReduce)
    throw std::invalid_argument(c10::str(collective.description(), " on rank ", rank(), ": the tensor is ",
                                         dtype == at::kShort ? "int16" : c10::toString(dtype),
                                         ", which NCCL cannot add: convert it, to int32 say"));
  for (at::Tensor* tensor : {&full, &shard})
    if (tensor->defined()) *tensor = tensor->view(at::kByte);
  for (auto* elements : {&counts, &send_counts})
    for (int64_t& count : *elements) count *= static_cast<int64_t>(c10::elementSize(dtype));
}

Pending NcclCommunicator::start(Collective collective) {
  make_sendable(collective);
  const auto& [kind, full, shard, what, counts, op, root, send_counts, numel, pieces] = collective;
  const std::string description =
      c10::str(collective.description(), kind == Collective::kReduce ? c10::str(" to rank ", root) : "", " (", numel,
               " elements)", label().empty() ? "" : " in the group of ", label());
  const OneCaller::Call call(one_caller());
  if (!call.is_alone()) refuse_second_thread(description);
  require_whole(description);
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& tensor : {full, shard})
    if (tensor.defined()) tensors.push_back(tensor);
  Work work;
  try {
    c10::DeviceGuard guard(device());
    work = launch(collective);
  } catch (const std::exception& error) {
    require_whole(description);
    throw CommError(c10::str(description, " failed on rank ", rank(), ": ", error.what()));
  }
  count_sent(sent_bytes(collective));
  {
    std::lock_guard lock(mutex_);
    watch_.started(sequence_++, description);
    under_way_.push_back({work, description, steady_clock::now()});
  }
  return Pending(std::make_unique<NcclOperation>(shared_from_this(), std::move(work), description, std::move(tensors)));
}

int64_t NcclCommunicator::sent_bytes(const Collective& collective) const {
  const auto full_bytes = static_cast<int64_t>(collective.full.defined() ? collective.full.nbytes() : 0);
  const auto shard_bytes = static_cast<int64_t>(collective.shard.defined() ? collective.shard.nbytes() : 0);
  const bool is_root = rank() == collective.root;
  switch (collective.kind) {
    case Collective::kAllGather:
      return shard_bytes * (size() - 1);
    case Collective::kReduceScatter:
      return full_bytes - shard_bytes;
    case Collective::kAllReduce:
    case Collective::kBackendAllReduce:
      return 2 * full_bytes * (size() - 1) / size();
    case Collective::kBroadcast:
      return is_root ? full_bytes : 0;
    case Collective::kReduce:
      return is_root ? 0 : full_bytes;
    case Collective::kScatter:
      return is_root ? full_bytes - shard_bytes : 0;
    case Collective::kAllToAll:
      return shard_bytes - collective.send_counts[rank()] * collective.shard.element_size();
  }
  return 0;
}

Work NcclCommunicator::launch(Collective& collective) {
  auto& [kind, full, shard, what, counts, op, root, send_counts, numel, pieces] = collective;
  const c10d::ReduceOp nccl_op = kNcclOps[static_cast<size_t>(op)];
  const bool is_even = std::adjacent_find(counts.begin(), counts.end(), std::not_equal_to<>()) == counts.end();
  std::vector<std::vector<at::Tensor>> parts;  // of `full`, where it is not one tensor to NCCL
  if (!is_even && kind != Collective::kScatter && kind != Collective::kAllToAll)
    parts.push_back(full.split_with_sizes(counts));
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
    case Collective::kReduce:  // NCCL writes to the root's tensor alone; the others' are inputs
      return group_->reduce(own, {.reduceOp = nccl_op, .rootRank = root});
    case Collective::kScatter:
      return launch_scatter(collective);
    case Collective::kAllToAll:
      return group_->alltoall_base(full, shard, counts, send_counts);
  }
  throw std::invalid_argument("unknown operation");
}

// ProcessGroupNCCL::scatter() wants even parts; an all-to-all in which only the root sends does not.
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
  std::lock_guard lock(mutex_);
  if (!broken_) return;
  is_told_ = true;
  throw CommError(c10::str(what, " on rank ", rank(), ": ", *broken_));
}

// With the lock. Moves what is through to `over`, to be let go without the lock, until one has an error: which it is.
std::string NcclCommunicator::take_ended(std::deque<UnderWay>& over) {
  while (!under_way_.empty() && under_way_.front().work->isCompleted()) {
    std::string error = error_of(*under_way_.front().work);  // c10d's, too, are completed
    if (!error.empty()) return error;
    over.push_back(std::move(under_way_.front()));
    under_way_.pop_front();
    ++ended_;
  }
  return "";
}

// An operation that was aborted has ended as well: that it is broken is known before.
void NcclCommunicator::require_ended(std::string_view what, bool all) {
  const auto began = steady_clock::now();
  std::string waits_for;
  for (auto pause = std::chrono::microseconds(20);; pause = std::min(2 * pause, kLongestPause)) {
    std::deque<UnderWay> over;
    std::unique_lock lock(mutex_);
    const std::string error = take_ended(over);
    const bool is_over = !ends_ && error.empty() && (under_way_.empty() || !all);
    if (waits_for.empty() && !under_way_.empty()) waits_for = under_way_.front().description;
    lock.unlock();
    require_whole(what);
    if (is_over) break;
    if (!error.empty()) {
      end_by(error);
    } else {
      std::this_thread::sleep_for(pause);
    }
  }
  if (!waits_for.empty()) count_wait(steady_clock::now() - began, waits_for);
}

// A peer that failed is NCCL's reason, too, but not named there.
void NcclCommunicator::end_by(const std::string& error) {
  const std::string known = watch_.explanation();
  end(known.empty() ? error : known, false);
}

void NcclCommunicator::look_after_operations(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  uint64_t waits_for = static_cast<uint64_t>(-1);
  int silent_looks = 0;  // several in a row: a machine that was held up asks first, and has its answer soon
  while (!changed_.wait_for(lock, stop, kLookAfterEvery, [&] { return stop.stop_requested(); })) {
    std::deque<UnderWay> over;
    const std::string error = take_ended(over);
    const bool waits = !under_way_.empty() && !ends_;
    const bool is_late = waits && steady_clock::now() - under_way_.front().began > timeout();
    const bool is_new = waits && waits_for != ended_;
    const auto unanswered = watch_.unanswered();
    silent_looks = waits && unanswered > StallWatch::kBeatsMissed * options_.beat_every ? silent_looks + 1 : 0;
    if (waits) waits_for = ended_;
    lock.unlock();
    over.clear();
    if (!error.empty() && waits) {
      end_by(error);
    } else if (silent_looks > 4) {
      end(c10::str("the store, in rank 0's process, has not answered for ", unanswered.count() / 1000,
                   " s: that process has stopped, or its host is gone"),
          false);
    } else if (is_late) {
      end(c10::str("timed out after ", static_cast<double>(timeout().count()) * 1e-3, " s; ", watch_.who_waits()),
          false);
    } else if (is_new) {
      watch_.begin_wait();
    } else if (!waits) {
      watch_.end_wait();
    }
    lock.lock();
    changed_.notify_all();
  }
}

void NcclCommunicator::wait_for_operations() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return size() == 1 || under_way_.empty() || broken_; });
}

// The first reason counts. Called by the thread of the watch too, which then knows the reason.
void NcclCommunicator::end(std::string reason, bool is_complete) noexcept {
  {
    if (reason.empty()) reason = watch_.explanation();
    std::lock_guard lock(mutex_);
    if (std::exchange(ends_, true)) return;
    if (!is_complete)
      reason = c10::str(under_way_.empty() ? "an operation" : under_way_.front().description, " failed on rank ",
                        rank(), " of ", size(), ": ", reason);
  }
  // First, since the process may end by what its own thread then throws; where rank 0's does, the store is gone.
  watch_.publish_failure(reason);
  watch_.await_readers();
  {
    std::lock_guard lock(mutex_);
    is_told_ = is_complete;
    broken_ = is_complete ? reason : "the group is broken since: " + reason;
    changed_.notify_all();
  }
  try {
    group_->abort();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): it is broken already, which is what was asked for
  }
}

}  // namespace

std::shared_ptr<Communicator> make_nccl_communicator(std::shared_ptr<NcclBackends> backends,
                                                     c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                                     at::Device device, NcclOptions options) {
  if (!device.is_cuda() || !device.has_index())
    throw std::invalid_argument(c10::str("rank ", rank, ": the NCCL backend was given device ", device,
                                         ", expected a CUDA device with an index"));
  c10::intrusive_ptr<c10d::Backend> group;
  try {
    auto made = in_time(options.timeout + kAnswerGrace, [=] {
      c10::DeviceGuard guard(device);
      return backends->make(c10::make_intrusive<c10d::PrefixStore>("nccl", store), rank, size, device, options.timeout);
    });
    if (!made)
      throw std::runtime_error(
          c10::str("not all of its ranks have come within ", options.timeout.count() / 1000, " s"));
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
static std::shared_ptr<NcclBackends> chosen_backends;

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
  if (!backends)
    throw std::invalid_argument(c10::str("rank ", rank, ": the NCCL backend for ", device,
                                         " is not in this build of Tessera: configure with -DTESSERA_CUDA=ON (preset "
                                         "cuda)"));
  return make_nccl_communicator(std::move(backends), std::move(store), rank, size, device, options);
}

}  // namespace tessera::internal
