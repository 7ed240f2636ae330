#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "core/comm/gloo/gloo_transports.h"
#include "core/comm/gloo/reduction_pipeline.h"
#include "core/comm/gloo/transport.h"
#include "core/runtime/guarded_by.h"

namespace tessera::internal {

// The resources that one operation holds while it is in flight.
struct OperationResources {
  TransportMessages messages;  // messages of the current step
  std::vector<at::Tensor> staging;
  std::shared_ptr<ReductionPipeline> pipeline;
  bool is_aborted = false;  // the group was closed before the messages were complete

  // Destroys all messages. If `keeper` is not null, first appends to it the tensors that a peer may still access.
  void drop(std::vector<at::Tensor>* keeper) noexcept;
};

// Tracks the operations of a group that are in flight on this rank, and the current wait of the rank's thread. Records
// whether the group is broken or closed. Thread-safe.
class OperationsInFlight {
 public:
  // If the group is broken, throws CommError, whose text begins with `what`.
  void require_whole(const std::string& what) const;
  std::optional<std::string> broken() const;
  bool is_closed() const;
  // Marks the group as broken. Only the first call sets the reason.
  void break_group(const std::string& reason);

  // Adds an operation. Throws as require_whole() does. `operation` must stay alive until remove().
  void add(OperationResources& operation, const std::string& what);
  // Removes an operation. If it was never awaited, keeps its messages until the group closes, because peers may need
  // them. First completes messages that need no wait, unless `may_complete` is false (in a child of fork()).
  void remove(OperationResources& operation, bool may_complete) noexcept;

  // Registers the wait that interrupt() ends. Returns false if the group is broken; the caller must not wait then.
  bool begin_wait(std::shared_ptr<InterruptibleWait> wait);
  bool begin_message_wait(const std::shared_ptr<TransportMessage>& message);
  void end_wait();
  void interrupt() noexcept;
  // Returns the reason why the current wait cannot complete; "" if the wait can complete, or if there is no wait.
  std::string why_disconnected();

  // Ends all operations and disconnects the transports. A second call is a no-op. All pipelines must have been stopped.
  void close(GlooTransports& transports) noexcept;

 private:
  bool begin_wait_locked(std::shared_ptr<InterruptibleWait> wait);

  mutable std::mutex mutex_;
  bool is_closed_ TESSERA_GUARDED_BY(mutex_) = false;
  std::optional<std::string> broken_ TESSERA_GUARDED_BY(mutex_);
  std::unordered_set<OperationResources*> operations_ TESSERA_GUARDED_BY(mutex_);
  std::shared_ptr<InterruptibleWait> current_wait_ TESSERA_GUARDED_BY(mutex_);
  std::vector<OperationResources> orphans_ TESSERA_GUARDED_BY(mutex_);  // of operations that were never awaited
};

}  // namespace tessera::internal
