// What joins a group, waits, closes and fails. Its collectives are in gloo_collectives.cpp.
#include "core/comm/gloo/gloo_communicator.h"

#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <exception>
#include <stdexcept>
#include <utility>

#include "core/comm/descriptors.h"
#include "core/comm/gloo/gloo_connections.h"
#include "core/runtime/in_time.h"
#include "core/runtime/sigpipe_block.h"

namespace tessera::internal {
namespace {

constexpr char kNoAnswer[] = "the store, in rank 0's process, does not answer";

std::string closed_text(int peer, const std::string& cause) {
  return c10::str(peer < 0 ? "a connection" : c10::str("the connection to rank ", peer),
                  " is closed, so that rank has ended or failed (", cause.substr(0, cause.find('\n')), ")");
}

// Of the tag of a message that nobody ever sends: no operation has so many steps.
constexpr int kNoStep = 3;

// With the other ranks.
GlooTransports connect(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const GlooOptions& options) {
  GlooTransports made;
  made.memory = PeerMemory::connect(*store, rank, size, options.timeout, options.peer_memory, options.permits_tracing);
  // On one host mostly nothing goes that way, and sockets and threads would be for nothing.
  if (!made.memory || !made.memory->reaches_all()) {
    require_descriptors(tcp_descriptors(size), c10::str("rank ", rank, "'s connections to ", size - 1, " others"),
                        options.raises_descriptor_limit);
    made.group = connect_by_tcp(store, rank, size, options, kConnectionsOfPair);
  }
  // A rank that has nothing to exchange must not leave while others are still connecting. By the store:
  // collectives of c10d's go through its flight recorder, which ranks that are threads would share.
  if (store->add("tessera/connected", 1) == size) store->set("tessera/all_connected", std::vector<uint8_t>{1});
  store->wait({"tessera/all_connected"}, options.timeout);
  return made;
}

// The same, which may never return. Throws CommError.
GlooTransports connect_in_time(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                               const GlooOptions& options) {
  const auto could_not_join = [&](const std::string& cause) {
    return CommError(c10::str("rank ", rank, " of ", size, " (address ", options.address,
                              ") could not join the group within ", static_cast<double>(options.timeout.count()) * 1e-3,
                              " s: ", cause));
  };
  try {
    if (auto made = in_time(options.timeout + kAnswerGrace, [=] { return connect(store, rank, size, options); }))
      return std::move(*made);
  } catch (const CommError&) {
    throw;
  } catch (const std::exception&) {
    throw could_not_join(text_of(std::current_exception()));
  }
  throw could_not_join(kNoAnswer);
}

}  // namespace

GlooCommunicator::GlooCommunicator(c10::intrusive_ptr<c10d::Backend> group, std::unique_ptr<PeerMemory> memory,
                                   c10::intrusive_ptr<c10d::Store> store, int rank, int size, GlooOptions options,
                                   RankWaits::Place place)
    : Communicator(rank, size, at::kCPU, options.timeout),
      store_(std::move(store)),
      options_(std::move(options)),
      memory_(std::move(memory)),
      rounds_(memory_ && memory_->reaches_all() ? std::make_unique<SharedRounds>(*memory_) : nullptr),
      group_(std::move(group)),
      watch_(store_, rank, size,
             {.interrupt =
                  [this] {
                    std::lock_guard lock(mutex_);
                    interrupt_locked();
                  },
              .why_disconnected = [this] { return closed_connection(); }},
             {.serves_store = options_.serves_store, .place = std::move(place)}) {}

GlooCommunicator::~GlooCommunicator() {
  if (std::uncaught_exceptions() > 0) {
    const std::string before = watch_.waits().failure();  // in another group, mostly what unwinds
    abort_this(before.empty() ? kUnwound : c10::str(kUnwound, ", after ", before));
  }
  pipelines_.stop();
  std::lock_guard lock(mutex_);
  close_locked();
}

int GlooCommunicator::ended_rank() const {
  for (int peer = 0; memory_ && peer < size(); ++peer)
    if (memory_->reaches(peer) && !memory_->is_alive(peer)) return peer;
  return -1;
}

void GlooCommunicator::abort_this(const std::string& reason) noexcept {
  if (!process_.is_this()) return;
  watch_.publish_failure(reason);
  break_and_interrupt("this rank left the group: " + reason);
  close_if_broken();
  watch_.await_readers();
}

GlooCommunicator::InCall::InCall(GlooCommunicator& comm, const std::string& what) : comm_(comm) {
  call_.emplace(comm.one_caller());
  if (call_->is_alone()) return;
  {
    std::lock_guard lock(comm.mutex_);
    if (comm.broken_) throw CommError(c10::str(what, " on rank ", comm.rank(), ": ", *comm.broken_));
  }
  comm.refuse_second_thread(what);
}

GlooCommunicator::InCall::~InCall() {
  const bool is_outermost = call_->is_outermost();
  call_.reset();
  if (is_outermost) comm_.close_if_broken();
}

// Who breaks the group sees who is inside, or that one sees as it leaves that the group is broken.
void GlooCommunicator::close_if_broken() noexcept {
  {
    std::lock_guard lock(mutex_);
    if (!broken_ || is_closed_) return;
  }
  const OneCaller::Call call(one_caller());
  if (!call.is_outermost()) return;
  pipelines_.stop();
  std::lock_guard lock(mutex_);
  if (!is_closed_) close_locked();
}

// What `connect` makes, which waits for other ranks in a store. That is a part of `op`: one that fails, leaves or
// diverges ends it.
template <class Connect>
auto GlooCommunicator::meet(const GlooOperation& op, const std::string& prefix, Connect connect) {
  const InCall call(*this, op.description());
  const auto meeting = c10::make_intrusive<InterruptibleStore>(prefix, store_);
  const auto meets = [&](bool begins) {
    std::lock_guard lock(mutex_);
    meets_in_ = begins ? meeting : nullptr;
    if (broken_) meeting->interrupt();
  };
  const auto began = std::chrono::steady_clock::now();
  std::optional<decltype(connect(meeting))> made;
  std::string error;
  watch_.begin_wait(op.sequence());
  meets(true);
  try {
    made = connect(meeting);
  } catch (const std::exception& lost) {
    error = lost.what();
  }
  meets(false);
  watch_.end_wait();
  count_wait(std::chrono::steady_clock::now() - began, op.description());
  if (made) return std::move(*made);
  if (meeting->is_interrupted()) fail(op, -1, false, "");
  if (meeting->has_timed_out()) fail(op, -1, false, "timed out");
  // The others wait for this one; by a store that does not answer they cannot be told.
  if (!error.ends_with(kNoAnswer)) abort_this(error);
  throw CommError(error);
}

std::shared_ptr<Communicator> GlooCommunicator::make_part(const std::string& name, const std::vector<int>& members,
                                                          int position) {
  std::string what = "joining the groups of a split";
  if (!label().empty()) what += " in the group of " + label();
  // On all ranks: one that is in no part counts it, too.
  const GlooOperation joining(shared_from_this(), std::move(what));
  RankWaits::Place place = watch_.part(name, members);
  if (position < 0) return nullptr;
  const int size = static_cast<int>(members.size());
  GlooTransports transports;
  if (size > 1)
    transports = meet(joining, name, [&](const c10::intrusive_ptr<c10d::Store>& meeting) {
      return connect_in_time(meeting, position, size, options_);
    });
  return make_group<GlooCommunicator>(std::move(transports.group), std::move(transports.memory),
                                      c10::make_intrusive<c10d::PrefixStore>(name, store_), position, size, options_,
                                      std::move(place));
}

// Where all ranks share memory, by the first operation that needs them, on every rank.
void GlooCommunicator::make_connections(const GlooOperation& op) {
  {
    std::lock_guard lock(mutex_);
    if (group_ || is_closed_) return;
  }
  auto made = meet(op, "connections", [&](const c10::intrusive_ptr<c10d::Store>& meeting) {
    std::string cause = kNoAnswer;
    try {
      auto connected = in_time(timeout() + kAnswerGrace, [meeting, rank = rank(), size = size(), options = options_] {
        return connect_by_tcp(meeting, rank, size, options, /*connections=*/1);
      });
      if (connected) return std::move(*connected);
    } catch (const std::exception& error) {
      cause = error.what();
    }
    throw CommError(c10::str(op.description(), " failed on rank ", rank(), " of ", size(), ": ", cause));
  });
  std::lock_guard lock(mutex_);
  if (!is_closed_) group_ = std::move(made);
}

c10::intrusive_ptr<c10d::Backend> GlooCommunicator::connections() {
  std::lock_guard lock(mutex_);
  if (is_closed_) throw std::runtime_error(broken_.value_or("the group is closed"));
  return group_;
}

c10::intrusive_ptr<c10d::Work> GlooCommunicator::post(const at::Tensor& tensor, int peer, bool is_send, int tag) {
  std::vector<at::Tensor> tensors{tensor};
  const auto group = connections();
  std::lock_guard lock(posting_);
  const SigpipeBlock no_sigpipe;
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
bool GlooCommunicator::begin_wait_for(const GlooMessage& message) {
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
  bool is_send = false, is_met = false;
  c10::intrusive_ptr<c10d::Backend> group;
  {
    std::lock_guard lock(mutex_);
    group = group_;
    is_met = meets_in_ != nullptr;
    if (waits_for_pipeline_) {
      peer = pipelines_.waits_for();
    } else if (waits_for_ != nullptr && waits_for_->work) {
      peer = waits_for_->peer;
      is_send = waits_for_->is_send;
    }
  }
  if (is_met && ended_rank() >= 0) return closed_text(ended_rank(), "its process is gone");
  if (!group || peer < 0) return "";
  std::vector<at::Tensor> nothing{at::empty({1}, at::TensorOptions(at::kCPU).dtype(at::kByte))};
  std::lock_guard lock(posting_);
  const SigpipeBlock no_sigpipe;
  try {
    group->recv(nothing, peer, kNoStep << 15 | connection_bit(rank(), peer, is_send));
    return "";
  } catch (const std::exception& error) {
    const std::string cause = error.what();
    // The wait has just ended by itself, at its timeout, and says so.
    return cause.find("Application timeout") != std::string::npos ? "" : closed_text(peer, cause);
  }
}

void GlooCommunicator::interrupt_locked() {
  if (waits_for_pipeline_) pipelines_.interrupt();
  if (meets_in_) meets_in_->interrupt();
  if (waits_for_ != nullptr) waits_for_->work ? waits_for_->work->abort() : memory_->interrupt();
}

void GlooCommunicator::break_and_interrupt(const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (!broken_) broken_ = reason;
  interrupt_locked();
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
  watch_.waits().note_failure(text);
  pipelines_.stop();
  {
    std::lock_guard lock(mutex_);
    if (!broken_) broken_ = "the group is broken since: " + text;
    close_locked();
  }
  watch_.await_readers();
  throw CommError(text);
}

std::shared_ptr<Communicator> make_gloo_communicator(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                                     GlooOptions options) {
  GlooTransports transports;
  if (size > 1) transports = connect_in_time(store, rank, size, options);
  return make_group<GlooCommunicator>(std::move(transports.group), std::move(transports.memory), std::move(store), rank,
                                      size, std::move(options));
}

}  // namespace tessera::internal
