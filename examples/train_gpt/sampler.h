#pragma once

#include <cstdint>
#include <vector>

#include <tessera/distributed_sampler.h>

namespace train_gpt {

// How one optimizer step's sequences are spread over ranks and micro-batches.
struct BatchShape {
  int64_t ranks = 1;
  int64_t batch = 1;         // sequences per rank and micro-batch
  int64_t accumulation = 1;  // micro-batches per step

  int64_t per_rank() const { return batch * accumulation; }
  int64_t global() const { return ranks * per_rank(); }
};

// Says where in the text the training sequences start.
//
// An epoch cuts the text into windows of context + 1 tokens that do not overlap, from an offset
// that changes with the epoch, and visits each once in random order. Epochs follow one another as
// one endless sequence of windows. Step s takes the next global() of them, and rank r a run of
// per_rank() of these: ranks never share a window, and since the sequence does not depend on the
// shape, any shapes with the same global() see the same sequences in each step. So training on 1,
// 2 or 4 ranks gives the same losses, to rounding, when --batch or --accumulate makes up for it.
class WindowSampler {
 public:
  // text_numel must be more than context.
  WindowSampler(int64_t text_numel, int64_t context, uint64_t seed, BatchShape shape);

  int64_t windows_per_epoch() const { return windows_; }

  // The first tokens of the windows of a micro-batch, `batch` of them.
  std::vector<int64_t> starts(int64_t step, int64_t micro_batch, int64_t rank);

 private:
  int64_t start_of(int64_t position);

  int64_t window_numel_;  // context + 1
  int64_t windows_;       // per epoch
  int64_t max_offset_;
  BatchShape shape_;
  tessera::EpochOrder order_;
};

// The windows that validate: `count` of them (all, if there are no more) spread evenly over the
// text, in order. A list that does not depend on the number of ranks.
std::vector<int64_t> validation_starts(int64_t text_numel, int64_t context, int64_t count);

}  // namespace train_gpt
