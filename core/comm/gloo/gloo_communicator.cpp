#include "core/comm/gloo/gloo_communicator.h"

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <stdexcept>
#include <thread>
#include <utility>

#include "core/comm/gloo/gloo_collectives.h"
#include "core/comm/gloo/gloo_connections.h"
#include "core/comm/guest/transport_source.h"
#include "core/comm/store_client.h"
#include "core/runtime/call_with_timeout.h"
#include "core/runtime/run_clock.h"

namespace tessera::internal {
namespace {

// A PrefixStore whose waits another thread can interrupt. c10d's own wait() cannot be interrupted, and it blocks all
// other calls of the store, such as those of a Watchdog. Therefore wait() of this class polls. Thread-safe if the
// underlying store is thread-safe.
class InterruptibleStore : public c10d::PrefixStore {
 public:
  using PrefixStore::PrefixStore;

  // Makes current and later waits throw std::runtime_error, unless their keys exist.
  void interrupt() { is_interrupted_ = true; }
  bool is_interrupted() const { return is_interrupted_; }
  // Whether a wait has exceeded its timeout and thrown std::runtime_error.
  bool has_timed_out() const { return has_timed_out_; }

  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    constexpr std::chrono::microseconds kLongestPause{50'000};
    const auto began = RunClock::now();
    for (std::chrono::microseconds pause{100}; !check(keys); pause = std::min(2 * pause, kLongestPause)) {
      if (is_interrupted_) throw std::runtime_error("the group is closed");
      if (timeout != kNoTimeout && RunClock::now() - began > timeout) {
        has_timed_out_ = true;
        throw std::runtime_error(c10::str("timed out after ", static_cast<double>(timeout.count()) * 1e-3, " s"));
      }
      std::this_thread::sleep_for(pause);
    }
  }
  std::vector<uint8_t> get(const std::string& key) override {
    wait({key});
    return PrefixStore::get(key);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    wait(keys);
    return PrefixStore::multiGet(keys);
  }

 private:
  std::atomic<bool> is_interrupted_ = false, has_timed_out_ = false;
};

// A wait for other ranks to connect, which the watchdog can end.
class MeetingWait : public InterruptibleWait {
 public:
  MeetingWait(c10::intrusive_ptr<InterruptibleStore> meeting, const GlooTransports& transports)
      : meeting_(std::move(meeting)), transports_(transports) {}
  void interrupt() noexcept override { meeting_->interrupt(); }
  std::string why_disconnected() override {
    const int ended = transports_.ended_rank();
    return ended >= 0 ? closed_connection_text(ended, "its process is gone") : "";
  }

 private:
  const c10::intrusive_ptr<InterruptibleStore> meeting_;
  const GlooTransports& transports_;
};

// Connects to the other ranks. Throws CommError on failure or after the timeout, even if the store does not answer.
GlooTransports connect_in_time(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                               const GlooOptions& options) {
  const auto could_not_join = [&](const std::string& cause) {
    return CommError(c10::str("rank ", rank, " of ", size, " (address ", options.address,
                              ") could not join the group within ", static_cast<double>(options.timeout.count()) * 1e-3,
                              " s: ", cause));
  };
  try {
    if (auto made = call_with_timeout(options.timeout + kAnswerGrace,
                                      [=] { return GlooTransports::connect(store, rank, size, options); }))
      return std::move(*made);
  } catch (const CommError&) {
    throw;
  } catch (const std::exception&) {
    throw could_not_join(text_of(std::current_exception()));
  }
  throw could_not_join(StoreClient::kNoAnswer);
}

}  // namespace

GlooCommunicator::GlooCommunicator(GlooTransports transports, c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                   GlooOptions options, WaitRegistry::Place place)
    : Communicator(rank, size, at::kCPU, options.timeout),
      store_(std::move(store)),
      options_(std::move(options)),
      transports_(std::move(transports)),
      watch_(store_, rank, size,
             {.interrupt = [this] { in_flight_.interrupt(); },
              .why_disconnected = [this] { return in_flight_.why_disconnected(); }},
             {.serves_store = options_.serves_store, .place = std::move(place)}) {}

GlooCommunicator::~GlooCommunicator() {
  if (std::uncaught_exceptions() > 0) {
    const std::string before = watch_.waits().failure();  // usually the failure that caused the exception
    abort_this(before.empty() ? kUnwound : c10::str(kUnwound, ", after ", before));
  }
  pipelines_.stop();
  in_flight_.close(transports_);
}

void GlooCommunicator::abort_this(const std::string& reason) noexcept {
  if (!process_.is_this()) return;
  watch_.publish_failure(reason);
  in_flight_.break_group("this rank left the group: " + reason);
  in_flight_.interrupt();
  close_if_broken();
  watch_.await_readers();
}

GlooCommunicator::InCall::InCall(GlooCommunicator& comm, const std::string& what) : comm_(comm) {
  call_.emplace(comm.single_thread_checker());
  if (call_->is_alone()) return;
  comm.in_flight_.require_whole(c10::str(what, " on rank ", comm.rank()));
  refuse_second_thread(comm, what);
}

GlooCommunicator::InCall::~InCall() {
  const bool is_outermost = call_->is_outermost();
  call_.reset();
  if (is_outermost) comm_.close_if_broken();
}

// Closes a broken group. A no-op if a call is in progress: each outermost call closes a broken group when the call
// ends. Thus a broken group is always closed.
void GlooCommunicator::close_if_broken() noexcept {
  if (!in_flight_.broken() || in_flight_.is_closed()) return;
  const SingleThreadChecker::Call call(single_thread_checker());
  if (!call.is_outermost()) return;
  pipelines_.stop();
  in_flight_.close(transports_);
}

// Returns the result of `connect`, which waits for the other ranks through a store with keys under `prefix`. The wait
// is part of `op`: the watchdog ends it if a rank fails, leaves or diverges. Throws CommError if the wait fails.
template <class Connect>
auto GlooCommunicator::meet(const GlooOperation& op, const std::string& prefix, Connect connect) {
  const InCall call(*this, op.description());
  const auto meeting = c10::make_intrusive<InterruptibleStore>(prefix, store_);
  const auto began = std::chrono::steady_clock::now();
  std::optional<decltype(connect(meeting))> made;
  std::string error;
  watch_.begin_wait(op.sequence());
  if (!in_flight_.begin_wait(std::make_shared<MeetingWait>(meeting, transports_))) meeting->interrupt();
  try {
    made = connect(meeting);
  } catch (const std::exception& lost) {
    error = lost.what();
  }
  in_flight_.end_wait();
  watch_.end_wait();
  count_wait(std::chrono::steady_clock::now() - began, op.description());
  if (made) return std::move(*made);
  if (meeting->is_interrupted()) fail(op, {-1, false, ""});
  if (meeting->has_timed_out()) fail(op, {-1, false, "timed out"});
  // Publishes the error to the other ranks, which wait for this rank. Impossible if the store does not answer.
  if (error.find(StoreClient::kNoAnswer) == std::string::npos) abort_this(error);
  throw CommError(error);
}

std::shared_ptr<Communicator> GlooCommunicator::make_part(const std::string& name, const std::vector<int>& members,
                                                          int position) {
  std::string what = "joining the groups of a split";
  if (!label().empty()) what += " in the group of " + label();
  // A split is an operation also on a rank that joins no part, so that all ranks number later operations alike.
  const GlooOperation joining(shared_from_this(), std::move(what));
  WaitRegistry::Place place = watch_.part(name, members);
  if (position < 0) return nullptr;
  const int size = static_cast<int>(members.size());
  GlooOptions options = options_;
  if (options.carrier) options.carrier = options.carrier->part(name, members);
  GlooTransports transports;
  if (size > 1)
    transports = meet(joining, name, [&](const c10::intrusive_ptr<c10d::Store>& meeting) {
      return connect_in_time(meeting, position, size, options);
    });
  return make_group<GlooCommunicator>(std::move(transports), c10::make_intrusive<c10d::PrefixStore>(name, store_),
                                      position, size, std::move(options), std::move(place));
}

// Makes the TCP connections, unless they exist. GlooTransports::connect() makes none if all ranks share memory.
void GlooCommunicator::make_connections(const GlooOperation& op) {
  if (transports_.tcp()->is_connected()) return;
  transports_.tcp()->connect(meet(op, "connections", [&](const c10::intrusive_ptr<c10d::Store>& meeting) {
    std::string cause = StoreClient::kNoAnswer;
    try {
      auto connected =
          call_with_timeout(timeout() + kAnswerGrace, [meeting, rank = rank(), size = size(), options = options_] {
            return connect_by_tcp(meeting, rank, size, options, /*connections=*/1);
          });
      if (connected) return std::move(*connected);
    } catch (const std::exception&) {
      cause = text_of(std::current_exception());
    }
    throw CommError(c10::str(op.description(), " failed on rank ", rank(), " of ", size(), ": ", cause));
  }));
}

Pending GlooCommunicator::start(Collective collective) {
  std::string description = collective.description() + collective.details();
  if (!label().empty()) description += " in the group of " + label();
  const InCall call(*this, description);
  auto op = std::make_unique<GlooOperation>(shared_from_this(), std::move(description));
  if (Transport* const carrier = transports_.carrier_of(collective)) {
    if (carrier == transports_.tcp()) make_connections(*op);
    op->start_collective(*carrier, collective);
  } else {
    GlooCollectives(*op, rank(), size(), transports_.are_eager()).start(collective);
  }
  return Pending(std::move(op));
}

void GlooCommunicator::fail(const GlooOperation& op, const MessageFailure& failure) {
  const auto& [peer, is_send, cause] = failure;
  std::string text = c10::str(op.description(), " failed on rank ", rank(), " of ", size());
  if (const std::string explanation = watch_.explanation(); !explanation.empty()) {
    text += ": " + explanation;
  } else if (cause.find("imed out") != std::string::npos) {
    text += c10::str(": timed out after ", static_cast<double>(timeout().count()) * 1e-3, " s ",
                     peer < 0 ? "with all ranks" : c10::str(is_send ? "sending to" : "waiting for", " rank ", peer));
    if (const std::string others = watch_.waiting_ranks(); !others.empty()) text += "; " + others;
  } else if (!cause.empty()) {
    text += ": " + (transports_.tcp() != nullptr
                        ? closed_connection_text(peer, cause)
                        : "the program's process group or MPI reports: " + cause.substr(0, cause.find('\n')));
  } else if (const auto broken = in_flight_.broken()) {
    text += ": " + *broken;
  }
  if (const std::string lost = watch_.store_failure(); !lost.empty()) text += "; " + lost;
  watch_.publish_failure(text);
  watch_.waits().note_failure(text);
  pipelines_.stop();
  in_flight_.break_group("the group is broken since: " + text);
  in_flight_.close(transports_);
  watch_.await_readers();
  throw CommError(text);
}

std::shared_ptr<Communicator> make_gloo_communicator(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                                     GlooOptions options) {
  store = StoreClient::of(std::move(store), options.timeout);
  GlooTransports transports;
  if (size > 1) transports = connect_in_time(store, rank, size, options);
  return make_group<GlooCommunicator>(std::move(transports), std::move(store), rank, size, std::move(options));
}

}  // namespace tessera::internal
