#include "sampler.h"

#include <algorithm>

namespace train_gpt {
namespace {

// As many windows as fit from every offset in [0, context], so that all epochs are alike; a text too short for that
// keeps one window and has fewer offsets.
int64_t windows_in(int64_t text_numel, int64_t context) {
  return std::max<int64_t>(1, (text_numel - context) / (context + 1));
}

}  // namespace

WindowSampler::WindowSampler(int64_t text_numel, int64_t context, uint64_t seed, BatchShape shape)
    : window_numel_(context + 1),
      windows_(windows_in(text_numel, context)),
      max_offset_(std::min(context, text_numel - windows_ * window_numel_)),
      shape_(shape),
      order_(windows_, seed) {}

std::vector<int64_t> WindowSampler::starts(int64_t step, int64_t micro_batch, int64_t rank) {
  const int64_t first = step * shape_.global() + rank * shape_.per_rank() + micro_batch * shape_.batch;
  std::vector<int64_t> starts(shape_.batch);
  for (int64_t i = 0; i < shape_.batch; ++i) starts[i] = start_of(first + i);
  return starts;
}

int64_t WindowSampler::start_of(int64_t position) {
  const int64_t offset = order_.draw_of_epoch(position / windows_, max_offset_ + 1);
  return offset + order_.item(position) * window_numel_;
}

std::vector<int64_t> validation_starts(int64_t text_numel, int64_t context, int64_t count) {
  const int64_t available = text_numel / (context + 1);
  const int64_t taken = std::min(count, available);
  std::vector<int64_t> starts(taken);
  for (int64_t i = 0; i < taken; ++i) starts[i] = i * available / taken * (context + 1);
  return starts;
}

}  // namespace train_gpt
