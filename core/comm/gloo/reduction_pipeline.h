#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

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

#include <tessera/communicator.h>
#include "core/runtime/task_queue.h"

namespace tessera::internal {

// Messages between ranks that share no memory travel in pieces of this many bytes, the last one of what is left: the
// same on both sides. Views of the tensor, which is flat, in order; none of an empty one.
inline constexpr int64_t kChunkBytes = int64_t{1} << 20;
std::vector<at::Tensor> chunks_of(const at::Tensor& tensor);

// Why a message did not come through.
struct MessageFailure {
  int peer;
  bool is_send;
  std::string cause;  // "": it was interrupted
};

// What one rank does in a reduction over ranks that share no memory: adds up its part chunk by chunk, in rank order,
// while the next chunks travel, and passes each sum on as soon as it is there. It needs no thread of the caller's:
// PipelineThread runs it. Between its construction and the end of that nobody else touches `own` and `out`.
//
// Staging: of every other rank kStagingBytes / (ranks - 1), at least kLeastAhead chunks, at most the part. That many
// chunks are announced ahead; a peer that has more to send waits with the rest.
class ReductionPipeline {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  static constexpr int64_t kStagingBytes = int64_t{32} << 20;
  static constexpr int64_t kLeastAhead = 4;

  struct Published {
    Work work;
    int peer;
  };

  // Both start a message and return; of a chunk. Called by the constructor's thread and by PipelineThread's.
  struct Transport {
    std::function<Work(const at::Tensor& chunk, int peer)> receive;
    std::function<Work(const at::Tensor& chunk, int peer)> publish;  // null: the sum stays here
  };

  // `own` is what this rank has of its part, in segments that every rank has, `out` where the sum comes (one segment's
  // memory, or apart): flat, contiguous, of one dtype. No chunk is of two segments.
  ReductionPipeline(int rank, int world, const std::vector<at::Tensor>& own, const at::Tensor& out, ReduceOp op,
                    Transport transport);

  // Announces the first chunks; or why that failed. Once, before it is run.
  std::optional<MessageFailure> announce();

 private:
  friend class PipelineThread;
  using Wait = std::function<bool(const Work&, int peer)>;
  std::optional<MessageFailure> run(const Wait& wait);
  bool sum_up(const Wait& wait);
  void receive(size_t chunk);
  void let_go();
  MessageFailure failure(std::string cause) const { return {peer_, is_send_, std::move(cause)}; }
  size_t ahead() const { return received_.size(); }

  const int rank_, world_;
  const ReduceOp op_;
  const Transport transport_;
  std::vector<at::Tensor> own_, out_;            // by chunk
  at::Tensor staging_;                           // [chunks ahead, ranks - 1, elements of a chunk]
  std::vector<std::vector<at::Tensor>> places_;  // of it: by chunk modulo chunks ahead, and rank
  std::vector<std::vector<Work>> received_;      // the same; announced and not waited for yet
  std::vector<Published> published_;
  int peer_ = -1;  // of the message that is started or waited for
  bool is_send_ = false;
  std::fenv_t rounding_;  // the caller's modes, denormals among them: sums are the same on any thread
  bool is_over_ = false;  // PipelineThread's
};

// The thread that runs a group's pipelines, one after the other in the order of add(). Waits are without a deadline:
// whoever needs a result has one.
class PipelineThread {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  PipelineThread() = default;
  ~PipelineThread() { stop(); }

  void add(const std::shared_ptr<ReductionPipeline>& pipeline);

  // Returns when it is over, or why it will not be: what failed first in any pipeline, or "timed out". One thread.
  std::optional<MessageFailure> wait(const ReductionPipeline& pipeline, Deadline until);
  // The messages of a pipeline that is over and may still be on their way, to be waited for.
  static std::vector<ReductionPipeline::Published> published(ReductionPipeline& pipeline);
  // Forgets the messages of a pipeline that is over, or was stopped.
  static void drop(ReductionPipeline& pipeline) noexcept;

  // Whose message the thread waits for; -1: it does not wait. Any thread.
  int waits_for();

  // Nothing is run any more; wait() returns. Any thread.
  void interrupt() noexcept;
  // The same, and returns when nothing touches a tensor any more: after a chunk's sum at most.
  void stop() noexcept;

 private:
  void run(ReductionPipeline& pipeline);
  bool wait_for(const ReductionPipeline::Work& work, int peer);

  std::mutex mutex_;  // guards all but the last
  std::condition_variable changed_;
  ReductionPipeline::Work waits_for_;
  int peer_ = -1;  // whose message was waited for last
  int64_t added_ = 0, ended_ = 0;
  bool stopped_ = false;
  std::optional<MessageFailure> failure_;
  std::unique_ptr<TaskQueue> thread_;  // made when there is something to run
};

}  // namespace tessera::internal
