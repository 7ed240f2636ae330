// The gloo backend: the only file that includes ProcessGroupGloo.hpp.
//
// gloo's own reduce-scatter clones its input, all-reduces the clone and keeps a part, and its
// all-gather is a ring of copies. Here every operation is a set of sends and receives between
// pairs of ranks, all at once, straight out of and into the caller's tensors; sums are taken in
// rank order when the operation is waited for. Ranks of one host read and write each other's memory
// (PeerMemory), others use gloo's TCP. Each message carries a tag made of the operation's
// number and a hash of what it is for, so that ranks which have diverged never mix up data: they
// stall, and StallWatch says why.
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <csignal>

#include <chrono>
#include <iterator>
#include <mutex>
#include <numeric>
#include <optional>
#include <sstream>
#include <unordered_set>

#include "tessera/comm/backend_all_reduce.h"
#include "tessera/comm/backends.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/fingerprint.h"
#include "tessera/comm/peer_memory.h"
#include "tessera/comm/rank_order_sum.h"
#include "tessera/comm/stall_watch.h"

namespace tessera {
namespace {

using std::chrono::steady_clock;

// Up to here an all-reduce sends whole tensors in one step; above, it is a reduce-scatter and an
// all-gather, which send less where there are more than two ranks. The same for a broadcast,
// which above this shares the root's work out.
constexpr int64_t kOneStepBytes = 1 << 16;

class GlooCommunicator;

struct Message {
  c10::intrusive_ptr<c10d::Work> work;  // over TCP: holds the tensor
  PeerMemory::Announced announced;      // in memory: of
  at::Tensor tensor;
  int peer;  // -1: gloo's own collective, with all of them
  bool is_send;
};

// One operation under way. Its messages belong to one step at a time.
class GlooOperation : public Pending::Operation {
 public:
  GlooOperation(std::shared_ptr<GlooCommunicator> comm, const char* name, std::string what, int64_t numel);
  ~GlooOperation() override;

  void send(const at::Tensor& tensor, int peer);
  void receive(const at::Tensor& tensor, int peer);
  void all_reduce_by_gloo(const at::Tensor& tensor);
  at::Tensor staging(int64_t numel, at::ScalarType dtype);  // lent until the operation is over
  void wait_for_messages();
  void next_step() { ++step_; }
  void drop_messages() noexcept;
  void finish() override;

  std::function<void()> complete;  // what is left to do once the first step's messages are through
  std::string description() const;

 private:
  void start_message(const at::Tensor& tensor, int peer, bool is_send);
  bool wait_for(const Message& message, std::string* cause);
  int tag() const;
  uint64_t memory_tag() const;

  const std::shared_ptr<GlooCommunicator> comm_;
  const char* const name_;
  const std::string what_;
  const int64_t numel_;
  uint64_t sequence_;
  uint32_t fingerprint_;
  int step_ = 0;
  std::vector<Message> messages_;
  std::vector<at::Tensor> lent_;
};

class GlooCommunicator : public Communicator,
                         public BackendCollectives,
                         public std::enable_shared_from_this<GlooCommunicator> {
 public:
  GlooCommunicator(c10::intrusive_ptr<c10d::ProcessGroupGloo> group, std::unique_ptr<PeerMemory> memory,
                   c10::intrusive_ptr<c10d::Store> store, int rank, int size, GlooOptions options)
      : Communicator(rank, size, at::kCPU, options.timeout),
        store_(std::move(store)),
        options_(std::move(options)),
        memory_(std::move(memory)),
        group_(std::move(group)),
        watch_(store_, rank, size, [this] { interrupt(); }) {}

  ~GlooCommunicator() override { close(); }

  void abort_this(const std::string& reason) noexcept override {
    watch_.publish_failure(reason);
    std::lock_guard lock(mutex_);
    if (!broken_) broken_ = "this rank left the group: " + reason;
    // Where another thread waits, it closes the connections when it wakes up.
    if (!interrupt_locked()) close_locked();
  }

  Pending start_backend_all_reduce(at::Tensor tensor, std::string what) override {
    auto op = start("gloo all-reduce", std::move(what), tensor.numel());
    op->all_reduce_by_gloo(tensor);
    return Pending(std::move(op));
  }

 protected:
  std::shared_ptr<Communicator> make_part(const std::string& name, int rank, int size) override {
    return make_gloo_communicator(c10::make_intrusive<c10d::PrefixStore>(name, store_), rank, size, options_);
  }
  Pending start_all_gather(at::Tensor full, at::Tensor shard, Counts counts, std::string what) override;
  Pending start_reduce_scatter(at::Tensor shard, at::Tensor full, ReduceOp op, Counts counts,
                               std::string what) override;
  Pending start_all_reduce(at::Tensor tensor, ReduceOp op, std::string what) override;
  Pending start_broadcast(at::Tensor tensor, int root, std::string what) override;
  Pending start_reduce(at::Tensor tensor, int root, ReduceOp op, std::string what) override;
  Pending start_scatter(at::Tensor shard, at::Tensor full, int root, Counts counts, std::string what) override;

 private:
  friend class GlooOperation;

  std::unique_ptr<GlooOperation> start(const char* name, std::string what, int64_t numel) {
    return std::make_unique<GlooOperation>(shared_from_this(), name, std::move(what), numel);
  }
  // Messages of the parts of an operation; `op` outlives them.
  void exchange_shards(GlooOperation& op, const at::Tensor& full, const at::Tensor& shard, const Counts& counts);
  std::vector<at::Tensor> exchange_parts(GlooOperation& op, const at::Tensor& full, const Counts& counts);

  void interrupt() {
    std::lock_guard lock(mutex_);
    interrupt_locked();
  }
  bool interrupt_locked();
  void close() noexcept {
    std::lock_guard lock(mutex_);
    close_locked();
  }
  void close_locked() noexcept;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> connections();
  bool begin_wait_for(const Message& message);
  void end_waits();
  [[noreturn]] void fail(const GlooOperation& op, int peer, bool is_send, const std::string& cause);

  const c10::intrusive_ptr<c10d::Store> store_;
  const GlooOptions options_;
  const std::unique_ptr<PeerMemory> memory_;          // null: no other rank on this host, or none that can be reached
  std::mutex mutex_;                                  // guards the next seven
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group_;  // null once the group is broken
  std::optional<std::string> broken_;
  std::unordered_set<GlooOperation*> operations_;
  c10::intrusive_ptr<c10d::Work> current_;  // what this rank's thread waits for
  bool waits_for_memory_ = false;           // or that
  std::vector<Message> orphans_;            // of operations that were dropped, with their buffers
  std::vector<at::Tensor> orphan_buffers_;

  uint64_t sequence_ = 0;
  StallWatch watch_;
};

std::vector<int64_t> offsets_of(const std::vector<int64_t>& counts) {
  std::vector<int64_t> offsets(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), offsets.begin(), int64_t{0});
  return offsets;
}

std::vector<int64_t> even_counts(int64_t numel, int size) {
  std::vector<int64_t> counts(size, numel / size);
  for (int rank = 0; rank < numel % size; ++rank) ++counts[rank];
  return counts;
}

// ---------------------------------------------------------------------------------------------

GlooOperation::GlooOperation(std::shared_ptr<GlooCommunicator> comm, const char* name, std::string what, int64_t numel)
    : comm_(std::move(comm)), name_(name), what_(std::move(what)), numel_(numel) {
  const std::string text = description();
  fingerprint_ = static_cast<uint32_t>(Fingerprint().add(text).value());
  sequence_ = comm_->sequence_++;
  comm_->watch_.started(sequence_, text);
  std::lock_guard lock(comm_->mutex_);
  if (comm_->broken_) throw CommError(text + " on rank " + std::to_string(comm_->rank()) + ": " + *comm_->broken_);
  comm_->operations_.insert(this);
}

GlooOperation::~GlooOperation() {
  std::lock_guard lock(comm_->mutex_);
  comm_->operations_.erase(this);
  // Never waited for: the peers still count on the messages, so they and their tensors live on.
  if (comm_->group_ && !messages_.empty()) {
    std::move(messages_.begin(), messages_.end(), std::back_inserter(comm_->orphans_));
    std::move(lent_.begin(), lent_.end(), std::back_inserter(comm_->orphan_buffers_));
  }
}

std::string GlooOperation::description() const {
  std::ostringstream text;
  text << name_;
  if (!what_.empty()) text << " of " << what_;
  text << " (" << numel_ << " elements)";
  if (!comm_->label().empty()) text << " in the group of " << comm_->label();
  return text.str();
}

// 14 bits of number keep operations apart that are in flight together, 2 of step, 15 of hash.
int GlooOperation::tag() const {
  return static_cast<int>((sequence_ & 0x3fff) << 17 | (step_ & 0x3) << 15 | (fingerprint_ & 0x7fff));
}

uint64_t GlooOperation::memory_tag() const {
  return sequence_ << 34 | static_cast<uint64_t>(step_) << 32 | fingerprint_;
}

void GlooOperation::send(const at::Tensor& tensor, int peer) {
  start_message(tensor, peer, /*is_send=*/true);
  comm_->count_sent(static_cast<int64_t>(tensor.nbytes()));
}

void GlooOperation::receive(const at::Tensor& tensor, int peer) { start_message(tensor, peer, /*is_send=*/false); }

void GlooOperation::start_message(const at::Tensor& tensor, int peer, bool is_send) {
  if (tensor.numel() == 0) return;
  try {
    if (PeerMemory* memory = comm_->memory_.get(); memory != nullptr && memory->reaches(peer)) {
      auto announced = is_send ? memory->send(tensor, peer, memory_tag()) : memory->receive(tensor, peer, memory_tag());
      if (announced) messages_.push_back({nullptr, std::move(announced), tensor, peer, is_send});
      return;
    }
    std::vector<at::Tensor> tensors{tensor};
    const auto group = comm_->connections();
    messages_.push_back(
        {is_send ? group->send(tensors, peer, tag()) : group->recv(tensors, peer, tag()), nullptr, {}, peer, is_send});
  } catch (const std::exception& error) {
    comm_->fail(*this, peer, is_send, error.what());
  }
}

void GlooOperation::all_reduce_by_gloo(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  std::vector<at::Tensor> tensors{tensor};
  // c10d's FlightRecorder, one for the process, notes a group's first collective in a map before it takes its lock
  // (recordWithResetEnabled, in FlightRecorderDetail.hpp): ranks that are threads would do so at once.
  static std::mutex recording;
  try {
    std::lock_guard lock(recording);
    messages_.push_back({comm_->connections()->allreduce(tensors), nullptr, {}, -1, true});
  } catch (const std::exception& error) {
    comm_->fail(*this, -1, true, error.what());
  }
  comm_->count_sent(2 * static_cast<int64_t>(tensor.nbytes()) * (comm_->size() - 1) / comm_->size());
}

at::Tensor GlooOperation::staging(int64_t numel, at::ScalarType dtype) {
  lent_.push_back(at::empty({numel}, at::TensorOptions().dtype(dtype)));
  return lent_.back();
}

void GlooOperation::drop_messages() noexcept { messages_.clear(); }

void GlooOperation::wait_for_messages() {
  if (messages_.empty()) return;
  const auto began = steady_clock::now();
  comm_->watch_.begin_wait();
  for (const Message& message : messages_) {
    bool arrived = comm_->begin_wait_for(message);
    std::string cause;
    if (arrived) arrived = wait_for(message, &cause);
    if (arrived) continue;
    comm_->watch_.end_wait();
    comm_->fail(*this, message.peer, message.is_send, cause);  // clears messages_, so the loop ends here
  }
  comm_->end_waits();
  comm_->watch_.end_wait();
  messages_.clear();
  comm_->count_wait(steady_clock::now() - began);
}

bool GlooOperation::wait_for(const Message& message, std::string* cause) {
  if (message.work) {
    try {
      return message.work->wait(comm_->timeout());
    } catch (const std::exception& error) {
      *cause = error.what();
      return false;
    }
  }
  switch (comm_->memory_->wait(message.announced)) {
    case PeerMemory::Outcome::kDone:
      return true;
    case PeerMemory::Outcome::kInterrupted:
      return false;
    case PeerMemory::Outcome::kTimedOut:
      *cause = "timed out";
      return false;
    case PeerMemory::Outcome::kPeerLeft:
      *cause = "it has left the group";
      return false;
    case PeerMemory::Outcome::kPeerDied:
      *cause = "its process is gone";
      return false;
    case PeerMemory::Outcome::kOtherBytes:
      *cause = "it has another number of bytes for it";
      return false;
  }
  return false;
}

void GlooOperation::finish() {
  wait_for_messages();
  if (complete) complete();
  lent_.clear();
}

// ---------------------------------------------------------------------------------------------

c10::intrusive_ptr<c10d::ProcessGroupGloo> GlooCommunicator::connections() {
  std::lock_guard lock(mutex_);
  if (!group_) throw std::runtime_error(broken_.value_or("the group is closed"));
  return group_;
}

// False where the group is broken, and there is nothing to wait for.
bool GlooCommunicator::begin_wait_for(const Message& message) {
  std::lock_guard lock(mutex_);
  current_ = message.work;
  waits_for_memory_ = message.announced != nullptr;
  if (waits_for_memory_ && !broken_) memory_->clear_interrupt();
  return !broken_;
}

void GlooCommunicator::end_waits() {
  std::lock_guard lock(mutex_);
  current_.reset();
  waits_for_memory_ = false;
}

// Whether there was a wait to interrupt.
bool GlooCommunicator::interrupt_locked() {
  if (current_) current_->abort();
  if (waits_for_memory_) memory_->interrupt();
  return current_ || waits_for_memory_;
}

void GlooCommunicator::close_locked() noexcept {
  if (memory_) memory_->close();  // first: the tensors below are then nobody's but ours
  waits_for_memory_ = false;
  current_.reset();
  for (GlooOperation* operation : operations_) operation->drop_messages();
  orphans_.clear();
  group_.reset();  // closes the connections: the peers' waits end now
}

void GlooCommunicator::fail(const GlooOperation& op, int peer, bool is_send, const std::string& cause) {
  std::ostringstream text;
  text << op.description() << " failed on rank " << rank() << " of " << size();
  const std::string explanation = watch_.explanation();
  {
    std::lock_guard lock(mutex_);
    if (broken_ && explanation.empty() && cause.empty()) text << ": " << *broken_;
  }
  if (!explanation.empty()) {
    text << ": " << explanation;
  } else if (cause.find("imed out") != std::string::npos) {
    text << ": timed out after " << static_cast<double>(timeout().count()) * 1e-3 << " s "
         << (peer < 0 ? "with all ranks" : (is_send ? "sending to rank " : "waiting for rank ") + std::to_string(peer))
         << "; " << watch_.who_waits();
  } else if (!cause.empty()) {
    text << ": " << (peer < 0 ? "a connection" : "the connection to rank " + std::to_string(peer))
         << " is closed, so that rank has ended or failed (" << cause.substr(0, cause.find('\n')) << ")";
  }
  watch_.publish_failure(text.str());
  {
    std::lock_guard lock(mutex_);
    if (!broken_) broken_ = "the group is broken since: " + text.str();
    close_locked();
  }
  throw CommError(text.str());
}

// [Note: sends first]
// gloo sends a message when both sides have announced it. Where the receiver was first, send()
// itself writes the data, holding the connection's lock; if data comes in meanwhile, gloo's I/O
// thread cannot take the lock and spins on the readable socket, on two cores in the writer's way
// for whole time slices. That is why small exchanges could take 4 ms. So each rank announces its
// sends before its receives: the data is then written by the I/O threads, or by a rank that comes
// late and has nothing to read yet, and the rank's own thread goes on computing.

// Every rank's shard into every rank's full tensor.
void GlooCommunicator::exchange_shards(GlooOperation& op, const at::Tensor& full, const at::Tensor& shard,
                                       const Counts& counts) {
  const auto offsets = offsets_of(counts);
  // Peers in turn from the next rank on, so that not everybody sends to rank 0 first.
  for (int step = 1; step < size(); ++step) op.send(shard, (rank() + step) % size());
  for (int step = 1; step < size(); ++step) {
    const int from = (rank() - step + size()) % size();
    op.receive(full.narrow(0, offsets[from], counts[from]), from);
  }
  const at::Tensor own = full.narrow(0, offsets[rank()], counts[rank()]);
  if (own.numel() > 0 && own.const_data_ptr() != shard.const_data_ptr()) own.copy_(shard);
}

// Each rank's part of everybody's full tensor, in rank order; this rank's own is a view of `full`.
std::vector<at::Tensor> GlooCommunicator::exchange_parts(GlooOperation& op, const at::Tensor& full,
                                                         const Counts& counts) {
  const auto offsets = offsets_of(counts);
  std::vector<at::Tensor> parts(size());
  parts[rank()] = full.narrow(0, offsets[rank()], counts[rank()]);
  for (int step = 1; step < size(); ++step) {
    const int to = (rank() + step) % size();
    op.send(full.narrow(0, offsets[to], counts[to]), to);
  }
  for (int step = 1; step < size(); ++step) {
    const int from = (rank() - step + size()) % size();
    parts[from] = op.staging(counts[rank()], full.scalar_type());
    op.receive(parts[from], from);
  }
  return parts;
}

Pending GlooCommunicator::start_all_gather(at::Tensor full, at::Tensor shard, Counts counts, std::string what) {
  auto op = start("all-gather", std::move(what), full.numel());
  exchange_shards(*op, full, shard, counts);
  return Pending(std::move(op));
}

Pending GlooCommunicator::start_reduce_scatter(at::Tensor shard, at::Tensor full, ReduceOp reduce, Counts counts,
                                               std::string what) {
  auto op = start("reduce-scatter", std::move(what), full.numel());
  auto parts = exchange_parts(*op, full, counts);
  op->complete = [shard, parts, reduce] { reduce_in_rank_order(shard, parts, reduce); };
  return Pending(std::move(op));
}

Pending GlooCommunicator::start_all_reduce(at::Tensor tensor, ReduceOp reduce, std::string what) {
  auto op = start("all-reduce", std::move(what), tensor.numel());
  if (static_cast<int64_t>(tensor.nbytes()) <= kOneStepBytes) {
    const Counts everything(size(), tensor.numel());
    std::vector<at::Tensor> parts(size());
    parts[rank()] = tensor;
    for (int step = 1; step < size(); ++step) op->send(tensor, (rank() + step) % size());
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      parts[peer] = op->staging(tensor.numel(), tensor.scalar_type());
      op->receive(parts[peer], peer);
    }
    op->complete = [tensor, parts, reduce] { reduce_in_rank_order(tensor, parts, reduce); };
    return Pending(std::move(op));
  }
  const Counts counts = even_counts(tensor.numel(), size());
  auto parts = exchange_parts(*op, tensor, counts);
  op->complete = [this, op = op.get(), tensor, parts, reduce, counts] {
    reduce_in_rank_order(parts[rank()], parts, reduce);
    op->next_step();
    exchange_shards(*op, tensor, parts[rank()], counts);
    op->wait_for_messages();
  };
  return Pending(std::move(op));
}

Pending GlooCommunicator::start_broadcast(at::Tensor tensor, int root, std::string what) {
  auto op = start("broadcast", std::move(what), tensor.numel());
  if (size() == 2 || static_cast<int64_t>(tensor.nbytes()) <= kOneStepBytes) {
    if (rank() != root) op->receive(tensor, root);
    for (int peer = 0; peer < size(); ++peer)
      if (rank() == root && peer != root) op->send(tensor, peer);
    return Pending(std::move(op));
  }
  // Scatter, then all-gather (van de Geijn): the root sends each element once, not size() times.
  const Counts counts = even_counts(tensor.numel(), size());
  const auto offsets = offsets_of(counts);
  const at::Tensor own = tensor.narrow(0, offsets[rank()], counts[rank()]);
  if (rank() != root) op->receive(own, root);
  for (int peer = 0; peer < size(); ++peer)
    if (rank() == root && peer != root) op->send(tensor.narrow(0, offsets[peer], counts[peer]), peer);
  op->complete = [this, op = op.get(), tensor, own, counts] {
    op->next_step();
    exchange_shards(*op, tensor, own, counts);
    op->wait_for_messages();
  };
  return Pending(std::move(op));
}

Pending GlooCommunicator::start_reduce(at::Tensor tensor, int root, ReduceOp reduce, std::string what) {
  auto op = start("reduce", std::move(what) + " to rank " + std::to_string(root), tensor.numel());
  if (rank() != root) {
    op->send(tensor, root);
    return Pending(std::move(op));
  }
  std::vector<at::Tensor> parts(size());
  parts[root] = tensor;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == root) continue;
    parts[peer] = op->staging(tensor.numel(), tensor.scalar_type());
    op->receive(parts[peer], peer);
  }
  op->complete = [tensor, parts, reduce] { reduce_in_rank_order(tensor, parts, reduce); };
  return Pending(std::move(op));
}

Pending GlooCommunicator::start_scatter(at::Tensor shard, at::Tensor full, int root, Counts counts, std::string what) {
  const int64_t numel = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  auto op = start("scatter", std::move(what), numel);
  if (rank() != root) {
    op->receive(shard, root);
    return Pending(std::move(op));
  }
  const auto offsets = offsets_of(counts);
  for (int peer = 0; peer < size(); ++peer) {
    const at::Tensor part = full.narrow(0, offsets[peer], counts[peer]);
    if (peer != root) {
      op->send(part, peer);
    } else if (part.const_data_ptr() != shard.const_data_ptr()) {
      shard.copy_(part);
    }
  }
  return Pending(std::move(op));
}

// gloo writes to its sockets without MSG_NOSIGNAL, so a peer that dies would end this process by
// SIGPIPE instead of an error. (Python ignores the signal, so torch's users never see it.)
void ignore_broken_pipes() {
  struct sigaction current = {};
  if (sigaction(SIGPIPE, nullptr, &current) != 0 || current.sa_handler != SIG_DFL) return;  // the program's own choice
  current.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &current, nullptr);
}

}  // namespace

std::shared_ptr<Communicator> make_gloo_communicator(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                                     GlooOptions options) {
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group;
  std::unique_ptr<PeerMemory> memory;
  if (size > 1) {
    ignore_broken_pipes();
    try {
      auto gloo = c10d::ProcessGroupGloo::Options::create(options.timeout);
      gloo->timeout = options.timeout;
      gloo->threads = 1;  // only sends and receives are used, which gloo's I/O thread runs
      gloo->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(options.address));
      group = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, std::move(gloo));
      memory = PeerMemory::connect(*store, rank, size, options.timeout, options.peer_memory);
      // A rank that has nothing to exchange must not leave while others are still connecting. By the store:
      // collectives of c10d's go through its flight recorder, which ranks that are threads would share.
      if (store->add("tessera/connected", 1) == size) store->set("tessera/all_connected", std::vector<uint8_t>{1});
      store->wait({"tessera/all_connected"}, options.timeout);
    } catch (const std::exception& error) {
      std::ostringstream text;
      text << "rank " << rank << " of " << size << " (address " << options.address
           << ") could not join the group within " << static_cast<double>(options.timeout.count()) * 1e-3
           << " s: " << error.what();
      throw CommError(text.str());
    }
  }
  return std::make_shared<GlooCommunicator>(std::move(group), std::move(memory), std::move(store), rank, size,
                                            std::move(options));
}

}  // namespace tessera
