#pragma once

#include <ATen/core/Tensor.h>

#include <cfenv>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/comm/gloo/transport.h"
#include "core/runtime/guarded_by.h"
#include "core/runtime/task_queue.h"

namespace tessera::internal {

// Size of the chunks in which eager transports send messages. chunks_of() returns views of a flat tensor's chunks, in
// order. The last chunk may be smaller. An empty tensor has no chunks.
inline constexpr int64_t kChunkBytes = int64_t{1} << 20;
std::vector<at::Tensor> chunks_of(const at::Tensor& tensor);

// One rank's part of a reduction over TCP, which PipelineThread runs. Reduces the part chunk by chunk, in rank order,
// while the next chunks are in flight. If Exchange::publish is set, sends each sum as soon as it is complete. `own` and
// `out` must not be accessed between construction and completion.
//
// The staging memory for one peer is kStagingBytes / (ranks - 1), but at least kLeastAhead chunks and at most the
// part's size. Receives are announced for as many chunks as fit into that memory. A peer waits to send further chunks.
class ReductionPipeline {
 public:
  using Message = std::shared_ptr<TransportMessage>;
  static constexpr int64_t kStagingBytes = int64_t{32} << 20;
  static constexpr int64_t kLeastAhead = 4;

  // Each function starts the message of one chunk and returns it. The constructing thread and PipelineThread call them.
  struct Exchange {
    std::function<Message(const at::Tensor& chunk, int peer)> receive;
    std::function<Message(const at::Tensor& chunk, int peer)> publish;  // null if this rank keeps the sum
  };

  // `own` is this rank's contribution to its own part, in segments whose sizes are the same on all ranks. `out`
  // receives the sum. If `own` has one segment, `out` may be that segment. Otherwise `out` must not overlap `own`. All
  // tensors are flat, contiguous and of one dtype. A chunk never spans two segments.
  ReductionPipeline(int rank, int world, const std::vector<at::Tensor>& own, const at::Tensor& out, ReduceOp op,
                    Exchange exchange);

  // Announces receives of the first chunks. Returns the failure, or nullopt. Must be called once, before run().
  std::optional<MessageFailure> announce();

 private:
  friend class PipelineThread;
  using Wait = std::function<std::optional<MessageFailure>(const Message&)>;
  std::optional<MessageFailure> run(const Wait& wait);
  std::optional<MessageFailure> receive(size_t chunk);
  std::optional<MessageFailure> publish(size_t chunk);
  void free_memory();
  size_t ahead() const { return received_.size(); }

  const int rank_, world_;
  const ReduceOp op_;
  const Exchange exchange_;
  std::vector<at::Tensor> own_, out_;            // indexed by chunk
  at::Tensor staging_;                           // [chunks ahead, ranks - 1, elements of a chunk]
  std::vector<std::vector<at::Tensor>> places_;  // views of staging_, indexed by chunk modulo ahead() and by rank
  std::vector<TransportMessages> received_;      // indexed as places_; announced receives that are not awaited yet
  TransportMessages published_;
  std::fenv_t rounding_;  // the constructing thread's floating-point modes, which affect the bits of a sum
  bool is_over_ = false;  // completed without a failure; guarded by PipelineThread::mutex_
};

// The thread that runs a group's pipelines, in the order of add(). It waits for messages without a deadline; the
// callers of wait() have a deadline.
class PipelineThread : public InterruptibleWait {
 public:
  using Deadline = TransportMessage::Deadline;

  PipelineThread() = default;
  ~PipelineThread() override { stop(); }

  void add(const std::shared_ptr<ReductionPipeline>& pipeline);

  // Blocks until the pipeline completes, and returns nullopt. Returns a failure if any pipeline fails first, if
  // interrupt() is called, or at the deadline ("timed out"). Must be called by one thread at a time.
  std::optional<MessageFailure> wait(const ReductionPipeline& pipeline, Deadline until);
  // Returns the sends of a completed pipeline. They may still be in flight, so the caller must await them.
  static TransportMessages published(ReductionPipeline& pipeline);
  // Destroys the messages of a pipeline that has completed or was stopped.
  static void drop(ReductionPipeline& pipeline) noexcept;

  // Permanently stops all pipelines before their next message, and makes wait() return. Thread-safe.
  void interrupt() noexcept override;
  // Returns the reason why the thread's awaited message cannot arrive; "" if the message can arrive. Thread-safe.
  std::string why_disconnected() override;
  // Calls interrupt(), and blocks until the thread runs no pipeline, at most for the duration of one chunk's reduction.
  void stop() noexcept;

 private:
  void run(ReductionPipeline& pipeline);
  std::optional<MessageFailure> wait_for(const ReductionPipeline::Message& message);

  std::mutex mutex_;
  std::condition_variable changed_;
  ReductionPipeline::Message waits_for_ TESSERA_GUARDED_BY(mutex_);
  int peer_ TESSERA_GUARDED_BY(mutex_) = -1;  // the peer of the last awaited message
  int64_t added_ TESSERA_GUARDED_BY(mutex_) = 0;
  int64_t ended_ TESSERA_GUARDED_BY(mutex_) = 0;
  bool stopped_ TESSERA_GUARDED_BY(mutex_) = false;
  std::optional<MessageFailure> failure_ TESSERA_GUARDED_BY(mutex_);
  std::unique_ptr<TaskQueue> thread_;  // made by the first add()
};

}  // namespace tessera::internal
