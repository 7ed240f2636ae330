#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <limits>
#include <mutex>
#include <string>

#include "core/comm/gloo/transport.h"
#include "core/runtime/guarded_by.h"

namespace tessera::internal {

// Carries messages to all ranks, and the all-reduce of c10d's gloo backend, over the backend's TCP connections. Tensors
// are sent in chunks of kChunkBytes.
class TcpTransport : public Transport {
 public:
  // If `group` is null, connect() must be called before start() or start_collective().
  TcpTransport(c10::intrusive_ptr<c10d::Backend> group, int rank, int size)
      : rank_(rank), size_(size), group_(std::move(group)) {}

  bool is_connected();
  void connect(c10::intrusive_ptr<c10d::Backend> group);

  bool reaches(int /*peer*/) const override { return true; }
  void start(const at::Tensor& tensor, int peer, bool is_send, const MessageTag& tag,
             TransportMessages& started) override;
  bool carries(const Collective& collective) const override;
  StartedCollective start_collective(const Collective& collective, const MessageTag& tag) override;
  int64_t max_eager_numel() const override { return std::numeric_limits<int64_t>::max(); }
  void disconnect() noexcept override;

 private:
  class Message;
  c10::intrusive_ptr<c10d::Backend> group();
  std::string why_disconnected(int peer, bool is_send);

  const int rank_, size_;
  std::mutex mutex_;
  c10::intrusive_ptr<c10d::Backend> group_ TESSERA_GUARDED_BY(mutex_);  // null before connect() and after disconnect()
  bool is_closed_ TESSERA_GUARDED_BY(mutex_) = false;
  std::mutex posting_;  // serializes the backend's send() and recv(), which are not thread-safe
};

// Returns the error text for a closed connection to `peer`, which is -1 if unknown. `cause` is the transport's error.
std::string closed_connection_text(int peer, const std::string& cause);

}  // namespace tessera::internal
