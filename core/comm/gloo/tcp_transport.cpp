#include "core/comm/gloo/tcp_transport.h"

#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <utility>

#include "core/comm/gloo/gloo_connections.h"
#include "core/comm/gloo/reduction_pipeline.h"
#include "core/runtime/run_clock.h"
#include "core/runtime/sigpipe_block.h"

namespace tessera::internal {
namespace {

// Step in the tag of a message that is never sent. No operation has so many steps.
constexpr int kNoStep = 3;

// Returns a tag that consists of, highest bit first, 14 bits of the sequence number (which distinguish the operations
// in flight), 2 bits of the step, 14 bits of the hash, and 1 bit for the connection (see [Note: one way]).
int tcp_tag(const MessageTag& tag, int connection) {
  return static_cast<int>((tag.sequence & 0x3fff) << 17 | (tag.step & 0x3) << 15 | (tag.fingerprint & 0x3fff) << 1) |
         connection;
}

}  // namespace

std::string closed_connection_text(int peer, const std::string& cause) {
  return c10::str(peer < 0 ? "a connection" : c10::str("the connection to rank ", peer),
                  " is closed, so that rank has ended or failed (", cause.substr(0, cause.find('\n')), ")");
}

class TcpTransport::Message : public TransportMessage {
 public:
  Message(TcpTransport& transport, c10::intrusive_ptr<c10d::Work> work, int peer, bool is_send)
      : TransportMessage(peer, is_send), transport_(transport), work_(std::move(work)) {}

  std::optional<MessageFailure> wait(Deadline until) override {
    if (peer() < 0) {  // a collective of gloo itself, whose wait cannot be interrupted
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - RunClock::now());
      // c10d interprets 0 as no timeout, so the least timeout here is 1 ms.
      if (work_->wait(std::max(left, std::chrono::milliseconds(1)))) return std::nullopt;
      return failure("");
    }
    // gloo's own timeout is not used: it also counts time while this process is stopped, and closes the connections.
    std::atomic<bool> is_late = false;
    const RunAlarm alarm(until, [&] {
      is_late = true;
      interrupt();
    });
    if (work_->wait(kUntilInterrupted)) return std::nullopt;
    return failure(is_late ? "timed out" : "");
  }
  void interrupt() noexcept override { work_->abort(); }
  std::string why_disconnected() override { return transport_.why_disconnected(peer(), is_send()); }

 private:
  TcpTransport& transport_;
  const c10::intrusive_ptr<c10d::Work> work_;  // owns the tensor
};

bool TcpTransport::is_connected() {
  std::lock_guard lock(mutex_);
  return group_ || is_closed_;
}

void TcpTransport::connect(c10::intrusive_ptr<c10d::Backend> group) {
  std::lock_guard lock(mutex_);
  if (!is_closed_) group_ = std::move(group);
}

c10::intrusive_ptr<c10d::Backend> TcpTransport::group() {
  std::lock_guard lock(mutex_);
  if (!group_) throw std::runtime_error("the group is closed");
  return group_;
}

void TcpTransport::start(const at::Tensor& tensor, int peer, bool is_send, const MessageTag& tag,
                         TransportMessages& started) {
  const int number = tcp_tag(tag, connection_bit(rank_, peer, is_send));
  for (const at::Tensor& chunk : chunks_of(tensor)) {
    std::vector<at::Tensor> tensors{chunk};
    const auto backend = group();
    std::lock_guard lock(posting_);
    const SigpipeBlock no_sigpipe;
    started.push_back(std::make_shared<Message>(
        *this, is_send ? backend->send(tensors, peer, number) : backend->recv(tensors, peer, number), peer, is_send));
  }
}

bool TcpTransport::carries(const Collective& collective) const {
  return collective.kind == Collective::kBackendAllReduce && collective.numel > 0;
}

Transport::StartedCollective TcpTransport::start_collective(const Collective& collective, const MessageTag&) {
  // c10d's FlightRecorder is one object for the process and records a group's first collective in a map before it takes
  // its lock (recordWithResetEnabled in FlightRecorderDetail.hpp). Ranks that are threads would race there.
  static std::mutex recording;
  std::vector<at::Tensor> tensors{collective.full};
  const auto backend = group();
  std::lock_guard lock(recording);
  return {std::make_shared<Message>(*this, backend->allreduce(tensors), /*peer=*/-1, /*is_send=*/true),
          2 * static_cast<int64_t>(collective.full.nbytes()) * (size_ - 1) / size_};
}

// When a connection ends, gloo ends the waits for messages that are announced on the connection. It does not end the
// wait for a message in transfer (Pair::signalException), which then lasts until its timeout. However, new
// announcements fail. So during a long wait this function announces the receive of a message that is never sent.
std::string TcpTransport::why_disconnected(int peer, bool is_send) {
  c10::intrusive_ptr<c10d::Backend> backend;
  {
    std::lock_guard lock(mutex_);
    backend = group_;
  }
  if (!backend || peer < 0) return "";
  std::vector<at::Tensor> nothing{at::empty({1}, at::TensorOptions(at::kCPU).dtype(at::kByte))};
  std::lock_guard lock(posting_);
  const SigpipeBlock no_sigpipe;
  try {
    backend->recv(nothing, peer, tcp_tag({.step = kNoStep}, connection_bit(rank_, peer, is_send)));
    return "";
  } catch (const std::exception& error) {
    const std::string cause = error.what();
    // A wait reached its timeout, so gloo closed the connection. That wait reports the timeout.
    return cause.find("Application timeout") != std::string::npos ? "" : closed_connection_text(peer, cause);
  }
}

void TcpTransport::disconnect() noexcept {
  c10::intrusive_ptr<c10d::Backend> closed;  // destroyed after the lock is released
  std::lock_guard lock(mutex_);
  is_closed_ = true;
  closed = std::move(group_);
}

}  // namespace tessera::internal
