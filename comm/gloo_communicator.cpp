// The gloo backend: the only file that includes ProcessGroupGloo.hpp.
//
// gloo's own reduce-scatter clones its input, all-reduces the clone and keeps a part, and its all-gather is a ring of
// copies. Here every operation is a set of sends and receives between pairs of ranks, all at once, straight out of and
// into the caller's tensors; sums are taken in rank order: when the operation is waited for where ranks of one host
// read and write each other's memory (PeerMemory), else chunk by chunk as gloo's TCP brings them (ReductionPipeline).
// What is small, where all ranks share memory, is no messages but one Meeting.
// Each message carries a tag made of the operation's number and a hash of what it is for, so that ranks which have
// diverged never mix up data: they stall, and StallWatch says why.
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <csignal>

#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <iterator>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>
#include <unordered_set>

#include "tessera/async/in_time.h"
#include "tessera/comm/backends.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/descriptors.h"
#include "tessera/comm/fingerprint.h"
#include "tessera/comm/group_process.h"
#include "tessera/comm/meeting.h"
#include "tessera/comm/notes.h"
#include "tessera/comm/peer_memory.h"
#include "tessera/comm/rank_order_sum.h"
#include "tessera/comm/reduction_pipeline.h"
#include "tessera/comm/stall_watch.h"

namespace tessera {
namespace {

using std::chrono::steady_clock;

// Up to here an all-reduce sends whole tensors in one step; above, it is a reduce-scatter and an all-gather, which send
// less where there are more than two ranks. The same for a broadcast, which above this shares the root's work out.
constexpr int64_t kOneStepBytes = 1 << 16;
// Between two ranks both ways send the same, and one step waits once: until adding up twice as much takes longer.
constexpr int64_t kOneStepBytesOfTwo = 1 << 19;
// Above so many ranks the largest or smallest of small integers spread by doubling: steps are waited for one by one,
// but there are few.
constexpr int kMostDirectRanks = 8;

// What PeerMemory's outcomes, in their order, say of an operation that failed; "" where the watch knows more.
constexpr const char* kCauses[] = {
    "", "", "timed out", "it has left the group", "its process is gone", "it has another number of bytes for it"};

constexpr char kNoAnswer[] = "the store, in rank 0's process, does not answer";

std::string closed_text(int peer, const std::string& cause) {
  return c10::str(peer < 0 ? "a connection" : c10::str("the connection to rank ", peer),
                  " is closed, so that rank has ended or failed (", cause.substr(0, cause.find('\n')), ")");
}

class GlooCommunicator;

struct Message {
  c10::intrusive_ptr<c10d::Work> work;  // over TCP: holds the tensor
  PeerMemory::Announced announced;      // in memory: of
  at::Tensor tensor;
  int peer;  // -1: gloo's own collective, with all of them; of a meeting who it waits for, once that is known
  bool is_send;
};

// Of a tag: which of two ranks' connections a message takes.
int connection_bit(int rank, int peer, bool is_send) { return is_send == (rank < peer) ? 1 : 0; }
// Of the tag of a message that nobody ever sends: no operation has so many steps.
constexpr int kNoStep = 3;

void keep_memory(const std::vector<Message>& messages, std::vector<at::Tensor>& keeper) {
  for (const Message& message : messages)
    if (message.announced) keeper.push_back(message.tensor);
}

// One operation under way. Its messages belong to one step at a time.
class GlooOperation : public Pending::Operation {
 public:
  GlooOperation(std::shared_ptr<GlooCommunicator> comm, std::string description);
  ~GlooOperation() override;

  void send(const at::Tensor& tensor, int peer);
  void receive(const at::Tensor& tensor, int peer) { start_message(tensor, peer, /*is_send=*/false); }
  // Into a tensor [numel] that is kept until the operation is over.
  at::Tensor receive_new(int64_t numel, at::ScalarType dtype, int peer);
  void all_reduce_by_gloo(const at::Tensor& tensor);
  // All of the operation, as a round of the group's Meeting: see there.
  void meet(const Meeting::Contribution& own, std::vector<uint64_t> expected,
            std::function<void(const Meeting::Contributions&)> read);
  // The sum of this rank's part, by the thread of pipelines, once start_pipeline() is called: of `own` and what the
  // others send in this step, into `out`. `publish`: and to all others, in the next step.
  void reduce_in_background(const at::Tensor& own, const at::Tensor& out, ReduceOp reduce, bool publish);
  void start_pipeline();
  void wait_for_messages();
  void next_step() { ++step_; }
  void drop_messages(std::vector<at::Tensor>* keeper) noexcept;
  void finish() override;

  std::function<void()> complete;  // what is left to do once the first step's messages are through
  const std::string& description() const { return description_; }

 private:
  void start_message(const at::Tensor& tensor, int peer, bool is_send);
  void wait_for_room();
  bool wait_for(Message& message, std::string* cause) const;
  void wait_for_pipeline();
  int tag(int peer, bool is_send, int step) const;
  uint64_t memory_tag() const;

  const std::shared_ptr<GlooCommunicator> comm_;
  const std::string description_;
  const uint32_t fingerprint_;
  const uint64_t sequence_;
  int step_ = 0;
  steady_clock::time_point deadline_;  // once it is waited for
  std::vector<Message> messages_;
  std::vector<at::Tensor> staging_;
  std::shared_ptr<ReductionPipeline> pipeline_;
  std::shared_ptr<Meeting::Round> round_;
  std::atomic<bool> is_cut_ = false;  // the group was closed before its messages were through
};

class GlooCommunicator : public Communicator, public HasStore, public std::enable_shared_from_this<GlooCommunicator> {
 public:
  GlooCommunicator(c10::intrusive_ptr<c10d::ProcessGroupGloo> group, std::unique_ptr<PeerMemory> memory,
                   c10::intrusive_ptr<c10d::Store> store, int rank, int size, GlooOptions options)
      : Communicator(rank, size, at::kCPU, options.timeout),
        store_(std::move(store)),
        options_(std::move(options)),
        memory_(std::move(memory)),
        meeting_(memory_ && memory_->reaches_all() ? std::make_unique<Meeting>(*memory_) : nullptr),
        group_(std::move(group)),
        watch_(store_, rank, size,
               {.interrupt =
                    [this] {
                      std::lock_guard lock(mutex_);
                      interrupt_locked();
                    },
                .why_cut = [this] { return closed_connection(); }},
               {.serves_store = options_.serves_store}) {}

  ~GlooCommunicator() override {
    if (std::uncaught_exceptions() > 0) abort_this(kUnwound);
    pipelines_.stop();
    std::lock_guard lock(mutex_);
    close_locked();
  }

  const c10::intrusive_ptr<c10d::Store>& store() const override { return store_; }

  void abort_this(const std::string& reason) noexcept override {
    if (!process_.is_this()) return;
    watch_.publish_failure(reason);
    // Where another thread waits, it closes the connections when it wakes up.
    if (!break_and_interrupt("this rank left the group: " + reason)) {
      pipelines_.stop();
      std::lock_guard lock(mutex_);
      close_locked();
    }
    watch_.await_readers();
  }

 protected:
  std::shared_ptr<Communicator> make_part(const std::string& name, const std::vector<int>& members,
                                          int position) override {
    if (position < 0) return nullptr;
    return make_gloo_communicator(c10::make_intrusive<c10d::PrefixStore>(name, store_), position,
                                  static_cast<int>(members.size()), options_);
  }
  Pending start(Collective collective) override;

 private:
  friend class GlooOperation;

  bool is_met(const Collective& collective) const;
  void meet_to_gather(GlooOperation& op, const Collective& collective);
  void meet_to_reduce(GlooOperation& op, const Collective& collective);
  int64_t bytes_sent_to_reduce(const Collective& collective) const;
  bool spreads_by_doubling(const at::Tensor& tensor, ReduceOp reduce) const;
  void reduce_scatter(GlooOperation& op, const at::Tensor& full, const at::Tensor& shard,
                      const std::vector<int64_t>& counts, ReduceOp reduce);
  void all_reduce(GlooOperation& op, const at::Tensor& tensor, ReduceOp reduce);
  void reduce_by_doubling(GlooOperation& op, const at::Tensor& tensor, ReduceOp reduce);
  void reduce_to_root(GlooOperation& op, const at::Tensor& tensor, ReduceOp reduce, int root);
  void broadcast(GlooOperation& op, const at::Tensor& tensor, int root);

  // Messages of the parts of an operation; `op` outlives them.
  template <class Send, class Receive>
  void exchange(Send send, Receive receive);
  void exchange_shards(GlooOperation& op, const at::Tensor& full, const at::Tensor& shard,
                       const std::vector<int64_t>& counts);
  std::vector<at::Tensor> exchange_parts(GlooOperation& op, const at::Tensor& full, const std::vector<int64_t>& counts);
  void send_parts(GlooOperation& op, const std::vector<at::Tensor>& parts, const at::Tensor& own, int root);

  // What comes from memory is there when it is waited for, and small sums are done sooner than a thread wakes up.
  bool reduces_in_background(const at::Tensor& tensor) const {
    return memory_ == nullptr && static_cast<int64_t>(tensor.nbytes()) > kOneStepBytes;
  }
  c10::intrusive_ptr<c10d::Work> post(const at::Tensor& tensor, int peer, bool is_send, int tag);
  std::optional<MessageFailure> wait_for(const ReductionPipeline& pipeline, PipelineThread::Deadline until);
  std::string closed_connection();
  bool interrupt_locked();
  bool break_and_interrupt(const std::string& reason);
  void close_locked() noexcept;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> connections();
  bool begin_wait_for(const Message& message);
  void end_waits();
  [[noreturn]] void fail(const GlooOperation& op, int peer, bool is_send, const std::string& cause);

  const GroupProcess process_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const GlooOptions options_;
  const std::unique_ptr<PeerMemory> memory_;          // null: no other rank on this host, or none that can be reached
  const std::unique_ptr<Meeting> meeting_;            // null: not all ranks
  std::mutex mutex_;                                  // guards the next nine
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group_;  // null until it is needed, and once this is closed
  bool is_closed_ = false;
  std::optional<std::string> broken_;
  std::unordered_set<GlooOperation*> operations_;
  const Message* waits_for_ = nullptr;  // of an operation that is under way
  bool waits_for_pipeline_ = false;
  std::vector<Message> orphans_;  // of operations that were dropped, with their tensors
  std::vector<at::Tensor> orphan_staging_;
  std::vector<std::shared_ptr<ReductionPipeline>> orphan_pipelines_;
  std::mutex posting_;  // of messages: c10d's group is for one thread at a time

  uint64_t sequence_ = 0;
  PipelineThread pipelines_;
  StallWatch watch_;
};

// Of each pair of ranks: [Note: one way].
constexpr int kConnections = 2;

// `connections` of each pair of ranks, all served by one thread.
c10::intrusive_ptr<c10d::ProcessGroupGloo> connect_by_tcp(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                          int size, const GlooOptions& options, int connections) {
  auto gloo = c10d::ProcessGroupGloo::Options::create(options.timeout);
  gloo->timeout = options.timeout;
  gloo->threads = 1;  // only sends and receives are used, which gloo's I/O thread runs
  gloo->devices.assign(connections, c10d::ProcessGroupGloo::createDeviceForHostname(options.address));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, std::move(gloo));
}

std::vector<int64_t> even_counts(int64_t numel, int size) {
  std::vector<int64_t> counts(size, numel / size);
  for (int rank = 0; rank < numel % size; ++rank) ++counts[rank];
  return counts;
}

// ---------------------------------------------------------------------------------------------

GlooOperation::GlooOperation(std::shared_ptr<GlooCommunicator> comm, std::string description)
    : comm_(std::move(comm)),
      description_(std::move(description)),
      fingerprint_(static_cast<uint32_t>(Fingerprint().add(description_).value())),
      sequence_(comm_->sequence_++) {
  comm_->process_.require_this(description_);
  comm_->watch_.started(sequence_, description_);
  std::lock_guard lock(comm_->mutex_);
  if (comm_->broken_) throw CommError(c10::str(description_, " on rank ", comm_->rank(), ": ", *comm_->broken_));
  comm_->operations_.insert(this);
}

GlooOperation::~GlooOperation() {
  if (round_) {  // nobody counts on anything: what this rank contributes lies in its slot
    messages_.clear();
    if (comm_->process_.is_this()) comm_->meeting_->drop(*round_);
  }
  std::lock_guard lock(comm_->mutex_);
  comm_->operations_.erase(this);
  // Never waited for: the peers still count on the messages, so they and their tensors live on.
  if (!comm_->is_closed_ && !messages_.empty()) {
    std::move(messages_.begin(), messages_.end(), std::back_inserter(comm_->orphans_));
    std::move(staging_.begin(), staging_.end(), std::back_inserter(comm_->orphan_staging_));
  }
  if (!comm_->is_closed_ && pipeline_) comm_->orphan_pipelines_.push_back(std::move(pipeline_));
}

// 14 bits of number keep operations apart that are in flight together, 2 of step, 14 of hash, and the last says which
// way: see [Note: one way].
int GlooOperation::tag(int peer, bool is_send, int step) const {
  return static_cast<int>((sequence_ & 0x3fff) << 17 | (step & 0x3) << 15 | (fingerprint_ & 0x3fff) << 1) |
         connection_bit(comm_->rank(), peer, is_send);
}

uint64_t GlooOperation::memory_tag() const {
  return sequence_ << 34 | static_cast<uint64_t>(step_) << 32 | fingerprint_;
}

void GlooOperation::send(const at::Tensor& tensor, int peer) {
  start_message(tensor, peer, /*is_send=*/true);
  comm_->count_sent(static_cast<int64_t>(tensor.nbytes()));
}

at::Tensor GlooOperation::receive_new(int64_t numel, at::ScalarType dtype, int peer) {
  staging_.push_back(at::empty({numel}, at::TensorOptions(at::kCPU).dtype(dtype)));
  receive(staging_.back(), peer);
  return staging_.back();
}

void GlooOperation::start_message(const at::Tensor& tensor, int peer, bool is_send) {
  if (tensor.numel() == 0) return;
  try {
    if (PeerMemory* memory = comm_->memory_.get(); memory != nullptr && memory->reaches(peer)) {
      auto announced = is_send ? memory->send(tensor, peer, memory_tag()) : memory->receive(tensor, peer, memory_tag());
      if (announced) messages_.push_back({nullptr, std::move(announced), tensor, peer, is_send});
      return;
    }
    for (const at::Tensor& chunk : chunks_of(tensor))
      messages_.push_back({comm_->post(chunk, peer, is_send, tag(peer, is_send, step_)), nullptr, {}, peer, is_send});
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
    const auto group = comm_->connections();  // which waits for the other ranks
    std::lock_guard lock(recording);
    messages_.push_back({group->allreduce(tensors), nullptr, {}, -1, true});
  } catch (const std::exception& error) {
    comm_->fail(*this, -1, true, error.what());
  }
  comm_->count_sent(2 * static_cast<int64_t>(tensor.nbytes()) * (comm_->size() - 1) / comm_->size());
}

void GlooOperation::meet(const Meeting::Contribution& own, std::vector<uint64_t> expected,
                         std::function<void(const Meeting::Contributions&)> read) {
  if (!comm_->meeting_->has_room()) wait_for_room();
  const bool is_read = read != nullptr;
  round_ = comm_->meeting_->begin(memory_tag(), own, std::move(expected), std::move(read));
  if (is_read) messages_.push_back({nullptr, nullptr, {}, -1, /*is_send=*/false});
}

// This rank is many rounds ahead of another one.
void GlooOperation::wait_for_room() {
  Message room{nullptr, nullptr, {}, -1, /*is_send=*/false};
  const auto began = steady_clock::now();
  comm_->watch_.begin_wait();
  auto outcome = PeerMemory::Outcome::kInterrupted;
  if (comm_->begin_wait_for(room)) outcome = comm_->meeting_->make_room(began + comm_->timeout(), room.peer);
  if (outcome == PeerMemory::Outcome::kDone) comm_->end_waits();
  comm_->watch_.end_wait();
  if (outcome != PeerMemory::Outcome::kDone)
    comm_->fail(*this, room.peer, room.is_send, kCauses[static_cast<size_t>(outcome)]);
  comm_->count_wait(steady_clock::now() - began, description_);
}

void GlooOperation::reduce_in_background(const at::Tensor& own, const at::Tensor& out, ReduceOp reduce, bool publish) {
  // Tags are of the step, so they are made here; the communicator outlives its pipelines.
  std::vector<int> receive_tags, publish_tags;
  for (int peer = 0; peer < comm_->size(); ++peer) {
    receive_tags.push_back(tag(peer, /*is_send=*/false, step_));
    publish_tags.push_back(tag(peer, /*is_send=*/true, step_ + 1));
  }
  ReductionPipeline::Transport transport;
  transport.receive = [comm = comm_.get(), tags = std::move(receive_tags)](const at::Tensor& chunk, int peer) {
    return comm->post(chunk, peer, /*is_send=*/false, tags[peer]);
  };
  if (publish)
    transport.publish = [comm = comm_.get(), tags = std::move(publish_tags)](const at::Tensor& chunk, int peer) {
      comm->count_sent(static_cast<int64_t>(chunk.nbytes()));
      return comm->post(chunk, peer, /*is_send=*/true, tags[peer]);
    };
  pipeline_ = std::make_shared<ReductionPipeline>(comm_->rank(), comm_->size(), own, out, reduce, std::move(transport));
  if (const auto failure = pipeline_->announce()) comm_->fail(*this, failure->peer, failure->is_send, failure->cause);
}

void GlooOperation::start_pipeline() { comm_->pipelines_.add(pipeline_); }

void GlooOperation::wait_for_pipeline() {
  const auto began = steady_clock::now();
  comm_->watch_.begin_wait();
  auto failure = comm_->wait_for(*pipeline_, deadline_);
  comm_->watch_.end_wait();
  if (failure) comm_->fail(*this, failure->peer, failure->is_send, failure->cause);
  for (auto& [work, peer] : PipelineThread::published(*pipeline_))
    messages_.push_back({std::move(work), nullptr, {}, peer, /*is_send=*/true});
  comm_->count_wait(steady_clock::now() - began, description_);
}

void GlooOperation::wait_for_messages() {
  if (messages_.empty()) return;
  const auto began = steady_clock::now();
  comm_->watch_.begin_wait();
  for (Message& message : messages_) {
    std::string cause;
    if (comm_->begin_wait_for(message) && wait_for(message, &cause)) continue;
    comm_->watch_.end_wait();
    comm_->fail(*this, message.peer, message.is_send, cause);  // clears messages_, so the loop ends here
  }
  comm_->end_waits();
  comm_->watch_.end_wait();
  messages_.clear();
  comm_->count_wait(steady_clock::now() - began, description_);
}

bool GlooOperation::wait_for(Message& message, std::string* cause) const {
  if (!message.work) {
    const auto outcome = round_ ? comm_->meeting_->wait(*round_, deadline_, message.peer)
                                : comm_->memory_->wait(message.announced, deadline_);
    *cause = kCauses[static_cast<size_t>(outcome)];
    return outcome == PeerMemory::Outcome::kDone;
  }
  try {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - steady_clock::now());
    return message.work->wait(std::max(left, std::chrono::milliseconds(1)));  // 0 would mean no timeout to c10d
  } catch (const std::exception& error) {
    *cause = error.what();
    return false;
  }
}

void GlooOperation::drop_messages(std::vector<at::Tensor>* keeper) noexcept {
  if (keeper != nullptr) keep_memory(messages_, *keeper);
  if (!messages_.empty()) is_cut_ = true;
  messages_.clear();
  if (pipeline_) PipelineThread::drop(*pipeline_);
}

void GlooOperation::finish() {
  deadline_ = steady_clock::now() + comm_->timeout();
  if (is_cut_) comm_->fail(*this, -1, false, "");
  if (round_) comm_->process_.require_this(description_);
  if (pipeline_) wait_for_pipeline();
  wait_for_messages();
  if (complete) complete();
  staging_.clear();
  pipeline_.reset();
}

// ---------------------------------------------------------------------------------------------

// Where all ranks share memory, they are made by the first operation that needs them, on every rank.
c10::intrusive_ptr<c10d::ProcessGroupGloo> GlooCommunicator::connections() {
  const auto known = [this]() -> c10::intrusive_ptr<c10d::ProcessGroupGloo> {
    if (is_closed_) throw std::runtime_error(broken_.value_or("the group is closed"));
    return group_;
  };
  {
    std::lock_guard lock(mutex_);
    if (auto group = known()) return group;
  }
  auto made = in_time(timeout() + kAnswerGrace, [store = store_, rank = rank(), size = size(), options = options_] {
    return connect_by_tcp(store, rank, size, options, /*connections=*/1);
  });
  if (!made) throw std::runtime_error(kNoAnswer);
  std::lock_guard lock(mutex_);
  if (!known()) group_ = std::move(*made);
  return group_;
}

c10::intrusive_ptr<c10d::Work> GlooCommunicator::post(const at::Tensor& tensor, int peer, bool is_send, int tag) {
  std::vector<at::Tensor> tensors{tensor};
  const auto group = connections();
  std::lock_guard lock(posting_);
  return is_send ? group->send(tensors, peer, tag) : group->recv(tensors, peer, tag);
}

std::optional<MessageFailure> GlooCommunicator::wait_for(const ReductionPipeline& pipeline,
                                                         PipelineThread::Deadline until) {
  const auto waits = [this](bool begins) {
    std::lock_guard lock(mutex_);
    waits_for_pipeline_ = begins;
    return !broken_;
  };
  if (!waits(true)) {
    waits(false);
    return MessageFailure{-1, false, ""};
  }
  auto failure = pipelines_.wait(pipeline, until);
  waits(false);
  return failure;
}

// False where the group is broken, and there is nothing to wait for.
bool GlooCommunicator::begin_wait_for(const Message& message) {
  std::lock_guard lock(mutex_);
  waits_for_ = &message;
  if (!message.work && !broken_) memory_->clear_interrupt();
  return !broken_;
}

void GlooCommunicator::end_waits() {
  std::lock_guard lock(mutex_);
  waits_for_ = nullptr;
}

// Where a connection ends, gloo ends the waits for the messages that are announced on it, but not for the one that is
// on its way (Pair::signalException): that wait would go on to its timeout. A further announcement does fail, so one is
// made on behalf of a wait that takes long. What it announces never comes.
std::string GlooCommunicator::closed_connection() {
  int peer = -1;
  bool is_send = false;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group;
  {
    std::lock_guard lock(mutex_);
    group = group_;
    if (waits_for_pipeline_) {
      peer = pipelines_.waits_for();
    } else if (waits_for_ != nullptr && waits_for_->work) {
      peer = waits_for_->peer;
      is_send = waits_for_->is_send;
    }
  }
  if (!group || peer < 0) return "";
  std::vector<at::Tensor> nothing{at::empty({1}, at::TensorOptions(at::kCPU).dtype(at::kByte))};
  std::lock_guard lock(posting_);
  try {
    group->recv(nothing, peer, kNoStep << 15 | connection_bit(rank(), peer, is_send));
    return "";
  } catch (const std::exception& error) {
    const std::string cause = error.what();
    // The wait has just ended by itself, at its timeout, and says so.
    return cause.find("Application timeout") != std::string::npos ? "" : closed_text(peer, cause);
  }
}

// Whether there was a wait to interrupt.
bool GlooCommunicator::interrupt_locked() {
  if (waits_for_pipeline_) pipelines_.interrupt();
  if (waits_for_ == nullptr) return waits_for_pipeline_;
  waits_for_->work ? waits_for_->work->abort() : memory_->interrupt();
  return true;
}

bool GlooCommunicator::break_and_interrupt(const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (!broken_) broken_ = reason;
  return interrupt_locked();
}

// Once the pipelines are stopped.
void GlooCommunicator::close_locked() noexcept {
  // First: the tensors below are then nobody's but ours. Unless a peer has stopped on its way to them: then their
  // memory must never be anything else's.
  static auto* const kept = new std::vector<at::Tensor>;
  static std::mutex keeping;
  const bool is_ours = !memory_ || memory_->close();
  waits_for_ = nullptr;
  is_closed_ = true;
  {
    std::lock_guard lock(keeping);
    for (GlooOperation* operation : operations_) operation->drop_messages(is_ours ? nullptr : kept);
    if (!is_ours) keep_memory(orphans_, *kept);
  }
  orphans_.clear();
  orphan_pipelines_.clear();
  // Closes the connections: the peers' waits end now. Without the lock: gloo waits for its thread to come by, up to 10
  // ms for each of them, and ranks that are threads would do so one after the other.
  group_.reset();
}

void GlooCommunicator::fail(const GlooOperation& op, int peer, bool is_send, const std::string& cause) {
  std::string text = c10::str(op.description(), " failed on rank ", rank(), " of ", size());
  if (const std::string explanation = watch_.explanation(); !explanation.empty()) {
    text += ": " + explanation;
  } else if (cause.find("imed out") != std::string::npos) {
    text += c10::str(": timed out after ", static_cast<double>(timeout().count()) * 1e-3, " s ",
                     peer < 0 ? "with all ranks" : c10::str(is_send ? "sending to" : "waiting for", " rank ", peer));
    if (const std::string others = watch_.who_waits(); !others.empty()) text += "; " + others;
  } else if (!cause.empty()) {
    text += ": " + closed_text(peer, cause);
  } else {
    std::lock_guard lock(mutex_);
    if (broken_) text += ": " + *broken_;
  }
  if (const std::string failure = watch_.store_failure(); !failure.empty()) text += "; " + failure;
  watch_.publish_failure(text);
  pipelines_.stop();
  {
    std::lock_guard lock(mutex_);
    if (!broken_) broken_ = "the group is broken since: " + text;
    close_locked();
  }
  watch_.await_readers();
  throw CommError(text);
}

Pending GlooCommunicator::start(Collective collective) {
  const auto& [kind, full, shard, what, counts, reduce, root, send_counts, numel] = collective;
  std::string description = collective.description();
  if (kind == Collective::kReduce) description += " to rank " + std::to_string(root);
  description += " (" + std::to_string(numel) + " elements)";
  if (!label().empty()) description += " in the group of " + label();
  auto op = std::make_unique<GlooOperation>(shared_from_this(), std::move(description));
  if (is_met(collective)) {
    kind == Collective::kAllGather ? meet_to_gather(*op, collective) : meet_to_reduce(*op, collective);
    return Pending(std::move(op));
  }
  switch (kind) {
    case Collective::kAllGather:
      exchange_shards(*op, full, shard, counts);
      break;
    case Collective::kReduceScatter:
      reduce_scatter(*op, full, shard, counts, reduce);
      break;
    case Collective::kAllReduce:
      all_reduce(*op, full, reduce);
      break;
    case Collective::kBroadcast:
      broadcast(*op, full, root);
      break;
    case Collective::kReduce:
      reduce_to_root(*op, full, reduce, root);
      break;
    case Collective::kScatter: {
      const auto parts = rank() == root ? full.split_with_sizes(counts) : std::vector<at::Tensor>();
      send_parts(*op, parts, shard, root);
      if (rank() == root && parts[root].const_data_ptr() != shard.const_data_ptr()) shard.copy_(parts[root]);
      break;
    }
    case Collective::kBackendAllReduce:
      op->all_reduce_by_gloo(full);
      break;
    case Collective::kAllToAll: {
      const auto to = shard.split_with_sizes(send_counts), from = full.split_with_sizes(counts);
      exchange([&](int peer) { op->send(to[peer], peer); }, [&](int peer) { op->receive(from[peer], peer); });
      if (from[rank()].numel() > 0) from[rank()].copy_(to[rank()]);
      break;
    }
  }
  return Pending(std::move(op));
}

bool GlooCommunicator::is_met(const Collective& collective) const {
  if (!meeting_ || collective.numel == 0) return false;
  switch (collective.kind) {
    case Collective::kAllGather:
    case Collective::kReduceScatter:
      return collective.numel <= meeting_->plan().most_numel();
    case Collective::kAllReduce:
    case Collective::kReduce:
      return collective.numel <= meeting_->plan().most_reduced_numel();
    default:
      return false;
  }
}

void GlooCommunicator::meet_to_gather(GlooOperation& op, const Collective& collective) {
  const auto& [kind, full, shard, what, counts, reduce, root, send_counts, numel] = collective;
  const auto element_bytes = static_cast<uint64_t>(full.element_size());
  std::vector<uint64_t> bytes;
  for (const int64_t count : counts) bytes.push_back(static_cast<uint64_t>(count) * element_bytes);
  auto* const all = static_cast<std::byte*>(full.mutable_data_ptr());
  const uint64_t own_begin = std::accumulate(bytes.begin(), bytes.begin() + rank(), uint64_t{0});
  if (shard.nbytes() > 0 && all + own_begin != shard.const_data_ptr())
    std::memcpy(all + own_begin, shard.const_data_ptr(), shard.nbytes());
  count_sent(static_cast<int64_t>(shard.nbytes()) * (size() - 1));
  op.meet({shard.const_data_ptr(), shard.nbytes()}, bytes, [full, all, bytes](const Meeting::Contributions& shards) {
    std::byte* place = all;
    for (size_t peer = 0; peer < shards.size(); place += bytes[peer++])
      if (shards[peer] != nullptr && bytes[peer] > 0) std::memcpy(place, shards[peer], bytes[peer]);
  });
}

// Of all that a rank has each other rank reads its part, or all of it.
void GlooCommunicator::meet_to_reduce(GlooOperation& op, const Collective& collective) {
  const auto& [kind, full, shard, what, counts, reduce, root, send_counts, numel] = collective;
  const bool has_parts = kind == Collective::kReduceScatter;
  const at::Tensor& out = has_parts ? shard : full;
  const auto element_bytes = static_cast<uint64_t>(full.element_size());
  const uint64_t begin =
      has_parts
          ? element_bytes * static_cast<uint64_t>(std::accumulate(counts.begin(), counts.begin() + rank(), int64_t{0}))
          : 0;
  const bool gives = kind != Collective::kReduce || rank() != root;
  const bool gets = (kind != Collective::kReduce || rank() == root) && out.numel() > 0;
  Meeting::Contribution own{full.const_data_ptr(), gives ? full.nbytes() : 0};
  if (has_parts) own.unread_begin = begin, own.unread_bytes = out.nbytes();
  count_sent(bytes_sent_to_reduce(collective));
  std::function<void(const Meeting::Contributions&)> read;
  if (gets)
    read = [full, out, begin, reduce](const Meeting::Contributions& contributions) {
      const auto* const mine = static_cast<const std::byte*>(full.const_data_ptr());
      std::vector<const void*> parts;
      for (const std::byte* contribution : contributions)
        parts.push_back((contribution == nullptr ? mine : contribution) + begin);
      reduce_in_rank_order(out.mutable_data_ptr(), parts, out.numel(), out.scalar_type(), reduce);
    };
  op.meet(own, std::vector<uint64_t>(static_cast<size_t>(size()), full.nbytes()), std::move(read));
}

// Who gives in a reduction sends it to all others, or to those who get a part of it or, where the largest or smallest
// of integers are looked for among many, to as many as their number has bits.
int64_t GlooCommunicator::bytes_sent_to_reduce(const Collective& collective) const {
  const auto bytes = static_cast<int64_t>(collective.full.nbytes());
  if (collective.kind == Collective::kReduceScatter) return bytes - static_cast<int64_t>(collective.shard.nbytes());
  if (collective.kind == Collective::kReduce) return rank() == collective.root ? 0 : bytes;
  return bytes * (spreads_by_doubling(collective.full, collective.op)
                      ? std::bit_width(static_cast<unsigned>(size() - 1))
                      : size() - 1);
}

// [Note: one way]
// Two connections join each pair of ranks, and data goes one way on each: on one from the lower rank, on the other to
// it. What comes the other way is small: announcements, without which gloo sends nothing. On one connection they would
// queue behind the data, so that of two ranks that are not in step one would begin to receive when it has sent
// everything; and while send() writes, holding the connection's lock, gloo's I/O thread would spin on what comes in.
//
// In memory each rank announces its sends first, so that what waits is read by whoever comes second.
//
// Peers in turn from the next rank on, so that not everybody sends to rank 0 first.
template <class Send, class Receive>
void GlooCommunicator::exchange(Send send, Receive receive) {
  const auto receive_all = [&] {
    for (int step = 1; step < size(); ++step) receive((rank() - step + size()) % size());
  };
  if (!memory_) receive_all();
  for (int step = 1; step < size(); ++step) send((rank() + step) % size());
  if (memory_) receive_all();
}

// Every rank's shard into every rank's full tensor.
void GlooCommunicator::exchange_shards(GlooOperation& op, const at::Tensor& full, const at::Tensor& shard,
                                       const std::vector<int64_t>& counts) {
  const auto parts = full.split_with_sizes(counts);
  exchange([&](int to) { op.send(shard, to); }, [&](int from) { op.receive(parts[from], from); });
  const at::Tensor& own = parts[rank()];
  if (own.numel() > 0 && own.const_data_ptr() != shard.const_data_ptr()) own.copy_(shard);
}

// Each rank's part of everybody's full tensor, in rank order; this rank's own is a view of `full`.
std::vector<at::Tensor> GlooCommunicator::exchange_parts(GlooOperation& op, const at::Tensor& full,
                                                         const std::vector<int64_t>& counts) {
  const auto sent = full.split_with_sizes(counts);
  auto parts = sent;
  exchange([&](int to) { op.send(sent[to], to); },
           [&](int from) { parts[from] = op.receive_new(counts[rank()], full.scalar_type(), from); });
  return parts;
}

// Root's parts[i] into rank i's `own`, for the others; these need no parts.
void GlooCommunicator::send_parts(GlooOperation& op, const std::vector<at::Tensor>& parts, const at::Tensor& own,
                                  int root) {
  if (rank() != root) return op.receive(own, root);
  exchange([&](int to) { op.send(parts[to], to); }, [](int) {});
}

void GlooCommunicator::reduce_scatter(GlooOperation& op, const at::Tensor& full, const at::Tensor& shard,
                                      const std::vector<int64_t>& counts, ReduceOp reduce) {
  const auto in_background = [&] {
    if (!reduces_in_background(shard)) return false;
    // A sum that comes before all is sent must not come where something is sent from.
    return !shard.is_alias_of(full) || shard.const_data_ptr() == full.split_with_sizes(counts)[rank()].const_data_ptr();
  };
  if (!in_background()) {
    op.complete = [shard, reduce, parts = exchange_parts(op, full, counts)] {
      reduce_in_rank_order(shard, parts, reduce);
    };
    return;
  }
  const auto parts = full.split_with_sizes(counts);
  op.reduce_in_background(parts[rank()], shard, reduce, /*publish=*/false);
  exchange([&](int to) { op.send(parts[to], to); }, [](int) {});
  op.start_pipeline();
}

bool GlooCommunicator::spreads_by_doubling(const at::Tensor& tensor, ReduceOp reduce) const {
  const bool is_in_any_order =
      c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/false) && reduce != ReduceOp::kSum;
  return size() > kMostDirectRanks && static_cast<int64_t>(tensor.nbytes()) <= kOneStepBytes && is_in_any_order;
}

void GlooCommunicator::all_reduce(GlooOperation& op, const at::Tensor& tensor, ReduceOp reduce) {
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  if (spreads_by_doubling(tensor, reduce)) return reduce_by_doubling(op, tensor, reduce);
  if (bytes <= (size() == 2 ? kOneStepBytesOfTwo : kOneStepBytes)) {
    std::vector<at::Tensor> parts(size(), tensor);
    exchange([&](int to) { op.send(tensor, to); },
             [&](int from) { parts[from] = op.receive_new(tensor.numel(), tensor.scalar_type(), from); });
    op.complete = [tensor, parts, reduce] { reduce_in_rank_order(tensor, parts, reduce); };
    return;
  }
  const auto counts = even_counts(tensor.numel(), size());
  if (reduces_in_background(tensor)) {
    const auto parts = tensor.split_with_sizes(counts);
    op.reduce_in_background(parts[rank()], parts[rank()], reduce, /*publish=*/true);
    exchange([&](int to) { op.send(parts[to], to); }, [](int) {});
    op.next_step();
    exchange([](int) {}, [&](int from) { op.receive(parts[from], from); });
    return op.start_pipeline();
  }
  op.complete = [this, &op, tensor, parts = exchange_parts(op, tensor, counts), reduce, counts] {
    reduce_in_rank_order(parts[rank()], parts, reduce);
    op.next_step();
    exchange_shards(op, tensor, parts[rank()], counts);
    op.wait_for_messages();
  };
}

// After each step a rank has the result over twice as many ranks, the last of them itself (dissemination, Hensgen,
// Finkel and Manber, 1988). Some are counted twice, which changes neither the largest nor the smallest. A peer is met
// once in each direction.
void GlooCommunicator::reduce_by_doubling(GlooOperation& op, const at::Tensor& tensor, ReduceOp reduce) {
  const auto start_step = [this, &op, tensor](int distance) {
    op.send(tensor, (rank() + distance) % size());
    return op.receive_new(tensor.numel(), tensor.scalar_type(), (rank() - distance + size()) % size());
  };
  op.complete = [this, &op, tensor, reduce, start_step, received = start_step(1)]() mutable {
    for (int distance = 2;; distance *= 2) {
      reduce_in_rank_order(tensor, {tensor, received}, reduce);
      if (distance >= size()) return;
      received = start_step(distance);
      op.wait_for_messages();
    }
  };
}

void GlooCommunicator::reduce_to_root(GlooOperation& op, const at::Tensor& tensor, ReduceOp reduce, int root) {
  if (rank() != root) return op.send(tensor, root);
  if (reduces_in_background(tensor)) {
    op.reduce_in_background(tensor, tensor, reduce, /*publish=*/false);
    return op.start_pipeline();
  }
  std::vector<at::Tensor> parts(size(), tensor);
  for (int peer = 0; peer < size(); ++peer)
    if (peer != root) parts[peer] = op.receive_new(tensor.numel(), tensor.scalar_type(), peer);
  op.complete = [tensor, parts, reduce] { reduce_in_rank_order(tensor, parts, reduce); };
}

void GlooCommunicator::broadcast(GlooOperation& op, const at::Tensor& tensor, int root) {
  if (size() == 2 || static_cast<int64_t>(tensor.nbytes()) <= kOneStepBytes)
    return send_parts(op, std::vector<at::Tensor>(size(), tensor), tensor, root);
  // Scatter, then all-gather (van de Geijn): the root sends each element once, not size() times.
  const auto counts = even_counts(tensor.numel(), size());
  const auto parts = tensor.split_with_sizes(counts);
  send_parts(op, parts, parts[rank()], root);
  op.complete = [this, &op, tensor, own = parts[rank()], counts] {
    op.next_step();
    exchange_shards(op, tensor, own, counts);
    op.wait_for_messages();
  };
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

int64_t tcp_descriptors(int size) {
  constexpr int64_t kOfDevice = 4;  // a socket that listens, what its thread waits with
  return kConnections * (size - 1 + kOfDevice);
}

namespace {

struct Transports {
  std::unique_ptr<PeerMemory> memory;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group;
};

// With the other ranks.
Transports connect(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const GlooOptions& options) {
  Transports made;
  made.memory = PeerMemory::connect(*store, rank, size, options.timeout, options.peer_memory);
  // On one host mostly nothing goes that way, and sockets and threads would be for nothing.
  if (!made.memory || !made.memory->reaches_all()) {
    require_descriptors(tcp_descriptors(size), c10::str("rank ", rank, "'s connections to ", size - 1, " others"));
    made.group = connect_by_tcp(store, rank, size, options, kConnections);
  }
  // A rank that has nothing to exchange must not leave while others are still connecting. By the store:
  // collectives of c10d's go through its flight recorder, which ranks that are threads would share.
  if (store->add("tessera/connected", 1) == size) store->set("tessera/all_connected", std::vector<uint8_t>{1});
  store->wait({"tessera/all_connected"}, options.timeout);
  return made;
}

}  // namespace

std::shared_ptr<Communicator> make_gloo_communicator(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                                     GlooOptions options) {
  Transports transports;
  if (size > 1) {
    ignore_broken_pipes();
    try {
      auto made = in_time(options.timeout + kAnswerGrace, [=] { return connect(store, rank, size, options); });
      if (!made) throw std::runtime_error(kNoAnswer);
      transports = std::move(*made);
    } catch (const CommError&) {
      throw;
    } catch (const std::exception& error) {
      throw CommError(c10::str("rank ", rank, " of ", size, " (address ", options.address,
                               ") could not join the group within ",
                               static_cast<double>(options.timeout.count()) * 1e-3, " s: ", error.what()));
    }
  }
  return make_group<GlooCommunicator>(std::move(transports.group), std::move(transports.memory), std::move(store), rank,
                                      size, std::move(options));
}

}  // namespace tessera
