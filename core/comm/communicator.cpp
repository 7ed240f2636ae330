#include <tessera/communicator.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include <tessera/host_results.h>
#include "core/comm/collective.h"
#include "core/comm/group_process.h"
#include "core/comm/library_collectives.h"
#include "core/comm/single_thread_checker.h"
#include "core/comm/traffic.h"
#include "core/memory/memory_kind_scope.h"
#include "core/runtime/dtypes.h"
#include "core/trace/ranges.h"
#include "core/trace/trace.h"

namespace tessera {
using namespace internal;
namespace {

struct KindTraits {
  const char* name;
  SpanKind span;
  bool has_shards, reduces;
};
// Indexed by Collective::Kind.
constexpr KindTraits kTraits[] = {
    {"all-gather", SpanKind::kGather, true, false},
    {"reduce-scatter", SpanKind::kReduce, true, true},
    {"all-reduce", SpanKind::kReduce, false, true},
    {"broadcast", SpanKind::kGather, false, false},
    {"reduce", SpanKind::kReduce, false, true},
    {"scatter", SpanKind::kGather, true, false},
    {"backend all-reduce", SpanKind::kReduce, false, true},
    {"all-to-all", SpanKind::kGather, false, false},
};

// Waits for an operation inside a named profiler range, and adds two spans to the trace. One span lasts from the start
// of the operation to the end of the wait. The other span covers only the wait.
class TracedOperation : public Pending::Operation {
 public:
  TracedOperation(const KindTraits& traits, const std::string& what, Pending pending)
      : traits_(traits), what_(what.empty() ? traits.name : what), pending_(std::move(pending)) {}
  void finish() override {
    const NestedRange range([&] { return c10::str("wait for ", traits_.name, " of ", what_); });
    const auto waits = Trace::Clock::now();
    pending_.wait();
    if (Trace::active() == nullptr) return;
    const auto end = Trace::Clock::now();
    Trace::active()->add(SpanKind::kWait, what_, traits_.name, waits, end);
    Trace::active()->add(traits_.span, what_, traits_.name, began_, end);
  }

 private:
  const KindTraits& traits_;
  const std::string what_;
  const Trace::Clock::time_point began_ = Trace::Clock::now();
  Pending pending_;
};

// Copies `from` to `to`, unless they share memory. Uses inference mode, so that autograd does not record the copy.
void copy_bytes(const at::Tensor& to, const at::Tensor& from) {
  c10::InferenceMode quiet;
  if (to.const_data_ptr() != from.const_data_ptr()) to.copy_(from);
}

bool is_reducible(at::ScalarType dtype, ReduceOp op) {
  const bool is_integral =
      dtype == at::kByte || dtype == at::kChar || dtype == at::kShort || dtype == at::kInt || dtype == at::kLong;
  return is_training_dtype(dtype) || (is_integral && op != ReduceOp::kAverage);
}

// Throws std::invalid_argument, with the operation and the rank, if a condition does not hold.
struct Require {
  const Collective& collective;
  const int rank;
  void operator()(bool holds, const auto&... otherwise) const {
    if (!holds) throw std::invalid_argument(c10::str(collective.description(), " on rank ", rank, ": ", otherwise...));
  }
};

void check_all_to_all(const Collective& collective, int rank, int size, const Require& require) {
  const at::Tensor &received = collective.all_to_all.received, &sent = collective.all_to_all.sent;
  const auto require_counts = [&](const std::vector<int64_t>& counts, const at::Tensor& tensor, const char* name) {
    require(static_cast<int>(counts.size()) == size, counts.size(), " counts of what is ", name,
            ", expected one per rank: ", size);
    for (int64_t count : counts) require(count >= 0, "a count of ", count);
    const int64_t sum = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    require(tensor.numel() == sum, "the tensor ", name, " has ", tensor.numel(), " elements, expected ", sum);
  };
  require_counts(collective.all_to_all.receive_counts, received, "received");
  require_counts(collective.all_to_all.send_counts, sent, "sent");
  require(collective.all_to_all.receive_counts[rank] == collective.all_to_all.send_counts[rank], "sends itself ",
          collective.all_to_all.send_counts[rank], " elements, receives ", collective.all_to_all.receive_counts[rank]);
  require(received.scalar_type() == sent.scalar_type(), "receives ", received.scalar_type(), " and sends ",
          sent.scalar_type(), ", expected one dtype");
}

// Throws std::invalid_argument if the arguments are wrong. Otherwise completes the fields of `collective`.
void check_and_complete(const Communicator& comm, Collective& collective) {
  const KindTraits& traits = kTraits[collective.kind];
  const auto kind = collective.kind;
  const ReduceOp op = collective.op;
  auto &full = collective.full, &shard = collective.shard;
  auto& counts = collective.counts;
  auto& numel = collective.numel;
  auto& pieces = collective.pieces;
  const Require require{collective, comm.rank()};
  const auto flatten = [&](at::Tensor& tensor, const char* name) {
    require(tensor.defined(), name, " is undefined");
    require(tensor.device() == comm.device(), name, " is on ", tensor.device(), ", expected ", comm.device());
    require(tensor.is_contiguous(), name, " is not contiguous; shape ", tensor.sizes());
    require(!tensor.is_conj() && !tensor.is_neg(), name,
            " has a conjugate or negative bit, by which its memory has other values, expected none: clone() it");
    if (tensor.dim() != 1 || tensor.requires_grad()) tensor = tensor.detach().view({-1});
  };
  require(collective.root >= 0 && collective.root < comm.size(), "root ", collective.root, ", expected 0 to ",
          comm.size() - 1);
  if (kind == Collective::kAllToAll) {
    flatten(collective.all_to_all.received, "the tensor");
    flatten(collective.all_to_all.sent, "the tensor to send");
    return check_all_to_all(collective, comm.rank(), comm.size(), require);
  }
  if (kind == Collective::kScatter && comm.rank() != collective.root) {
    full.reset();
  } else if (!pieces.empty()) {
    flatten(shard, "the shard");
    for (at::Tensor& piece : pieces) {
      flatten(piece, "a piece of the full tensor");
      require(piece.scalar_type() == shard.scalar_type(), "a piece of the full tensor is ", piece.scalar_type(),
              " and the shard ", shard.scalar_type(), ", expected one dtype");
    }
    if (!exchanges_pieces(comm)) full = at::cat(std::exchange(pieces, {}));
  } else {
    flatten(full, traits.has_shards ? "the full tensor" : "the tensor");
    numel = full.numel();
  }
  if (traits.has_shards) {
    flatten(shard, "the shard");
    if (counts.empty()) counts.assign(comm.size(), shard.numel());
    require(static_cast<int>(counts.size()) == comm.size(), counts.size(),
            " counts, expected one per rank: ", comm.size());
    for (int64_t count : counts) require(count >= 0, "a count of ", count);
    require(shard.numel() == counts[comm.rank()], "the shard has ", shard.numel(), " elements, expected ",
            counts[comm.rank()]);
    numel = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    const auto full_numel = std::accumulate(pieces.begin(), pieces.end(), int64_t{0},
                                            [](int64_t sum, const at::Tensor& piece) { return sum + piece.numel(); });
    require(pieces.empty() || full_numel == numel, "the full tensor's pieces have ", full_numel, " elements, expected ",
            numel);
    if (full.defined()) {
      require(full.numel() == numel, "the full tensor has ", full.numel(), " elements, expected ", numel);
      require(full.scalar_type() == shard.scalar_type(), "the full tensor is ", full.scalar_type(), " and the shard ",
              shard.scalar_type(), ", expected one dtype");
    }
  }
  const bool is_average = op == ReduceOp::kAverage;
  if (!traits.reduces) return;
  const at::ScalarType dtype = (full.defined() ? full : shard).scalar_type();
  require(is_reducible(dtype, op), "the tensor is ", dtype, ", expected ",
          is_average ? "" : "an integral type of 8 to 64 bits, ", "Half, BFloat16, Float or Double",
          is_average ? " for an average" : "");
}

}  // namespace

void Pending::wait() {
  const MemoryKindScope kind(MemoryKind::kTransport);
  finish();
}

internal::CommunicatorBackend::CommunicatorBackend()
    : counters_{std::make_shared<TrafficCounter>()},
      single_thread_checker_(std::make_unique<SingleThreadChecker>()),
      live_group_(std::make_unique<LiveGroup>()) {}
internal::CommunicatorBackend::~CommunicatorBackend() = default;

Communicator::Communicator(int rank, int size, at::Device device, std::chrono::milliseconds timeout)
    : rank_(rank), size_(size), device_(device), timeout_(timeout) {}
Communicator::~Communicator() = default;

// Uses no string stream, because a stream would be the main cost of starting an operation.
std::string Collective::description() const {
  return what.empty() ? kTraits[kind].name : std::string(kTraits[kind].name) + " of " + what;
}

std::string Collective::details() const {
  static constexpr const char* kResults[] = {"", ", averages", ", maxima", ", minima"};  // indexed by ReduceOp
  std::string text;
  if (kind == kReduce || kind == kBroadcast || kind == kScatter)
    text = (kind == kReduce ? " to rank " : " from rank ") + std::to_string(root);
  text += " (" + std::to_string(numel) + " elements";
  if (dtype() != at::kFloat) text.append(" of ").append(c10::toString(dtype()));
  return text + kResults[static_cast<size_t>(op)] + ")";
}

at::Tensor Communicator::buffer(int64_t numel, at::ScalarType dtype) {
  return at::empty({numel}, at::TensorOptions().dtype(dtype).device(device_));
}

void internal::refuse_second_thread(Communicator& comm, const std::string& what) {
  const std::string reason = c10::str(
      what, " on rank ", comm.rank(), " of ", comm.size(),
      ": another thread is in a call of this communicator, which one thread at a time may call; expected a group "
      "for each thread: split()");
  comm.abort(reason);
  throw CommError(reason);
}

Pending Communicator::begin(Collective collective) {
  check_and_complete(*this, collective);
  for (const auto& counter : counters_) counter->add_collective();
  const KindTraits& traits = kTraits[collective.kind];
  if (size_ > 1) {
    const bool is_traced = Trace::active() != nullptr || RangeSink::active() != nullptr;
    const std::string what = is_traced ? collective.what : "";
    const MemoryKindScope kind(MemoryKind::kTransport);
    const NestedRange range([&] { return collective.description(); });
    Pending pending = start(std::move(collective));
    if (!is_traced || pending.done()) return pending;
    return Pending(std::make_unique<TracedOperation>(traits, what, std::move(pending)));
  }
  const at::Tensor &full = collective.full, &shard = collective.shard;
  if (collective.kind == Collective::kAllToAll) {
    copy_bytes(collective.all_to_all.received, collective.all_to_all.sent);
  } else if (shard.defined()) {
    collective.kind == Collective::kAllGather ? copy_bytes(full, shard) : copy_bytes(shard, full);
  }
  return {};
}

Pending Communicator::all_gather(at::Tensor full, at::Tensor shard, std::vector<int64_t> counts,
                                 std::string_view what) {
  return begin({Collective::kAllGather, std::move(full), std::move(shard), std::string(what), std::move(counts)});
}

Pending Communicator::reduce_scatter(at::Tensor shard, at::Tensor full, ReduceOp op, std::vector<int64_t> counts,
                                     std::string_view what) {
  return begin(
      {Collective::kReduceScatter, std::move(full), std::move(shard), std::string(what), std::move(counts), op});
}

Pending internal::reduce_scatter_pieces(Communicator& comm, at::Tensor shard, std::vector<at::Tensor> pieces,
                                        ReduceOp op, std::string_view what) {
  if (pieces.size() == 1) return comm.reduce_scatter(std::move(shard), std::move(pieces[0]), op, {}, what);
  Collective collective{Collective::kReduceScatter, {}, std::move(shard), std::string(what), {}, op};
  collective.pieces = std::move(pieces);
  return comm.begin(std::move(collective));
}

bool internal::exchanges_pieces(const Communicator& comm) { return comm.size() > 1 && comm.takes_pieces(); }

Pending Communicator::all_reduce(at::Tensor tensor, ReduceOp op, std::string_view what) {
  return begin({Collective::kAllReduce, std::move(tensor), {}, std::string(what), {}, op});
}

Pending internal::backend_all_reduce(Communicator& comm, at::Tensor tensor, std::string_view what) {
  // gloo ends the process if sizes differ. This barrier's description has the size, so the barrier throws instead.
  if (comm.device().is_cpu()) comm.barrier(c10::str("the size of ", what, ", ", tensor.numel(), " elements"));
  return comm.begin({Collective::kBackendAllReduce, std::move(tensor), {}, std::string(what)});
}

Pending Communicator::broadcast(at::Tensor tensor, int root, std::string_view what) {
  return begin({Collective::kBroadcast, std::move(tensor), {}, std::string(what), {}, ReduceOp::kSum, root});
}

Pending Communicator::reduce(at::Tensor tensor, int root, ReduceOp op, std::string_view what) {
  return begin({Collective::kReduce, std::move(tensor), {}, std::string(what), {}, op, root});
}

Pending Communicator::scatter(at::Tensor shard, at::Tensor full, int root, std::vector<int64_t> counts,
                              std::string_view what) {
  return begin({Collective::kScatter, std::move(full), std::move(shard), std::string(what), std::move(counts),
                ReduceOp::kSum, root});
}

Pending Communicator::all_to_all(at::Tensor receive, at::Tensor send, std::vector<int64_t> receive_counts,
                                 std::vector<int64_t> send_counts, std::string_view what) {
  Collective collective{Collective::kAllToAll, {}, {}, std::string(what)};
  collective.all_to_all.received = std::move(receive);
  collective.all_to_all.sent = std::move(send);
  collective.all_to_all.receive_counts = std::move(receive_counts);
  collective.all_to_all.send_counts = std::move(send_counts);
  return begin(std::move(collective));
}

void Communicator::barrier(std::string_view what) {
  c10::InferenceMode quiet;
  if (what.empty()) what = "barrier";
  at::Tensor arrived = at::zeros({1}, at::TensorOptions().dtype(at::kByte).device(device_));
  all_reduce(arrived, ReduceOp::kMax, what).wait();
  if (device_.is_cuda()) to_host(arrived, what);  // wait() blocks only the stream, and to_host() also blocks the host
}

std::vector<std::shared_ptr<Communicator>> Communicator::parts() {
  std::lock_guard lock(parts_mutex_);
  return parts_;
}

void Communicator::throw_if_aborted(std::string_view what) {
  if (size_ > 1) require_ended(what, /*all=*/true);
  for (const auto& part : parts()) part->throw_if_aborted(what);
}

at::Tensor Communicator::to_host(const at::Tensor& result, std::string_view what) {
  at::Tensor copy = result.cpu();
  if (size_ > 1) require_ended(what, /*all=*/false);
  return copy;
}

std::shared_ptr<Communicator> Communicator::split(int color, int key) {
  if (size_ > 1) require_values("the colors of a split");
  c10::InferenceMode quiet;
  const at::Tensor own = at::tensor({color, key}, at::TensorOptions(at::kCPU).dtype(at::kLong));
  const at::Tensor all = gather_to_host(*this, own, "the colors of a split");
  const auto pairs = all.accessor<int64_t, 2>();
  std::vector<int> members;
  for (int rank = 0; rank < size_; ++rank)
    if (color >= 0 && pairs[rank][0] == color) members.push_back(rank);
  std::ranges::stable_sort(members, [&](int a, int b) { return pairs[a][1] < pairs[b][1]; });
  return group_of(members, color);
}

std::shared_ptr<Communicator> Communicator::split_by(const std::function<int(int rank)>& color_of) {
  if (!color_of) throw std::invalid_argument("Communicator::split_by: color_of is empty, expected a function");
  std::vector<int> members;
  std::vector<std::string> colors;
  const int color = color_of(rank_);
  for (int rank = 0; rank < size_; ++rank) {
    const int other = color_of(rank);
    if (other == color) members.push_back(rank);
    colors.push_back(c10::str("color ", other, " of rank ", rank));
  }
  if (size_ > 1) require_agreement(*this, "the colors of a split", colors);
  for (int rank = 0; rank < size_; ++rank)
    if (color_of(rank) < 0)
      throw std::invalid_argument("Communicator::split_by: " + colors[rank] + ", expected 0 or more");
  return group_of(members, color);
}

std::shared_ptr<Communicator> Communicator::group_of(const std::vector<int>& members, int color) {
  std::unique_lock lock(parts_mutex_);
  const int64_t number = splits_++;
  lock.unlock();
  const auto self = std::ranges::find(members, rank_);
  const int position = self == members.end() ? -1 : static_cast<int>(self - members.begin());
  auto part = make_part(c10::str("split", number, "/", color), members, position);
  if (!part) return nullptr;
  part->label_ = c10::str(ranks_text(members), " of ", size_, label_.empty() ? "" : ", in ", label_);
  part->counters_.insert(part->counters_.end(), counters_.begin(), counters_.end());
  lock.lock();
  parts_.push_back(part);
  return part;
}

void Communicator::abort(const std::string& reason) noexcept {
  abort_this(reason);
  for (const auto& part : parts()) part->abort(reason);
}

std::map<std::string, double> Communicator::reset_wait_times() { return counters_.front()->reset_wait_times(); }

void internal::CommunicatorBackend::count_sent(int64_t bytes) noexcept {
  for (const auto& counter : counters_) counter->add_sent(bytes);
}

void internal::CommunicatorBackend::count_wait(std::chrono::nanoseconds duration, const std::string& operation) {
  for (const auto& counter : counters_) counter->add_wait(duration, operation);
}

Traffic Communicator::traffic() const noexcept { return counters_.front()->total(); }

}  // namespace tessera
