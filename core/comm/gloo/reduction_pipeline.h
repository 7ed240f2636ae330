#pragma once

#include <ATen/core/Tensor.h>

#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/comm/collective.h"
#include "core/comm/gloo/transport.h"
#include "core/runtime/guarded_by.h"
#include "core/runtime/task_queue.h"

namespace tessera::internal {

// Messages between ranks that share no memory travel in pieces of this many bytes, the last one of what is left: the
// same on both sides. Views of the tensor, which is flat, in order; none of an empty one.
inline constexpr int64_t kChunkBytes = int64_t{1} << 20;
std::vector<at::Tensor> chunks_of(const at::Tensor& tensor);

// What one rank does in a reduction over ranks that share no memory: adds up its part chunk by chunk, in rank order,
// while the next chunks travel, and passes each sum on as soon as it is there. It needs no thread of the caller's:
// PipelineThread runs it. Between its construction and the end of that nobody else touches `own` and `out`.
//
// Staging: of every other rank kStagingBytes / (ranks - 1), at least kLeastAhead chunks, at most the part. That many
// chunks are announced ahead; a peer that has more to send waits with the rest.
class ReductionPipeline {
 public:
  using Message = std::shared_ptr<TransportMessage>;
  static constexpr int64_t kStagingBytes = int64_t{32} << 20;
  static constexpr int64_t kLeastAhead = 4;

  // Both start the message of one chunk and return. Called by the constructor's thread and by PipelineThread's.
  struct Exchange {
    std::function<Message(const at::Tensor& chunk, int peer)> receive;
    std::function<Message(const at::Tensor& chunk, int peer)> publish;  // null: the sum stays here
  };

  // `own` is what this rank has of its part, in segments that every rank has, `out` where the sum comes (one segment's
  // memory, or apart): flat, contiguous, of one dtype. No chunk is of two segments.
  ReductionPipeline(int rank, int world, const std::vector<at::Tensor>& own, const at::Tensor& out, ReduceOp op,
                    Exchange exchange);

  // Announces the first chunks; or why that failed. Once, before it is run.
  std::optional<MessageFailure> announce();

 private:
  friend class PipelineThread;
  using Wait = std::function<std::optional<MessageFailure>(const Message&)>;
  std::optional<MessageFailure> run(const Wait& wait);
  std::optional<MessageFailure> receive(size_t chunk);
  std::optional<MessageFailure> publish(size_t chunk);
  void let_go();
  size_t ahead() const { return received_.size(); }

  const int rank_, world_;
  const ReduceOp op_;
  const Exchange exchange_;
  std::vector<at::Tensor> own_, out_;            // by chunk
  at::Tensor staging_;                           // [chunks ahead, ranks - 1, elements of a chunk]
  std::vector<std::vector<at::Tensor>> places_;  // of it: by chunk modulo chunks ahead, and rank
  std::vector<TransportMessages> received_;      // the same; announced and not waited for yet
  TransportMessages published_;
  std::fenv_t rounding_;  // the caller's modes, denormals among them: sums are the same on any thread
  bool is_over_ = false;  // PipelineThread's
};

// The thread that runs a group's pipelines, one after the other in the order of add(). Waits are without a deadline:
// whoever needs a result has one.
class PipelineThread : public InterruptibleWait {
 public:
  using Deadline = TransportMessage::Deadline;

  PipelineThread() = default;
  ~PipelineThread() override { stop(); }

  void add(const std::shared_ptr<ReductionPipeline>& pipeline);

  // Returns when it is over, or why it will not be: what failed first in any pipeline, or "timed out". One thread.
  std::optional<MessageFailure> wait(const ReductionPipeline& pipeline, Deadline until);
  // The messages of a pipeline that is over and may still be on their way, to be waited for.
  static TransportMessages published(ReductionPipeline& pipeline);
  // Forgets the messages of a pipeline that is over, or was stopped.
  static void drop(ReductionPipeline& pipeline) noexcept;

  // Nothing is run any more; wait() returns. Any thread.
  void interrupt() noexcept override;
  // Of the message that the thread waits for. Any thread.
  std::string why_disconnected() override;
  // The same, and returns when nothing touches a tensor any more: after a chunk's sum at most.
  void stop() noexcept;

 private:
  void run(ReductionPipeline& pipeline);
  std::optional<MessageFailure> wait_for(const ReductionPipeline::Message& message);

  std::mutex mutex_;
  std::condition_variable changed_;
  ReductionPipeline::Message waits_for_ TESSERA_GUARDED_BY(mutex_);
  int peer_ TESSERA_GUARDED_BY(mutex_) = -1;  // whose message was waited for last
  int64_t added_ TESSERA_GUARDED_BY(mutex_) = 0;
  int64_t ended_ TESSERA_GUARDED_BY(mutex_) = 0;
  bool stopped_ TESSERA_GUARDED_BY(mutex_) = false;
  std::optional<MessageFailure> failure_ TESSERA_GUARDED_BY(mutex_);
  std::unique_ptr<TaskQueue> thread_;  // made when there is something to run
};

}  // namespace tessera::internal
