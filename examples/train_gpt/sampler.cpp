#include "sampler.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

namespace train_gpt {
namespace {

// A number in [0, bound). std::uniform_int_distribution differs between standard libraries; the
// bias of the remainder, at most bound / 2^64, does not matter here.
int64_t draw(std::mt19937_64& random, int64_t bound) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(bound));
}

}  // namespace

EpochOrder make_epoch_order(uint64_t seed, int64_t epoch, int64_t windows, int64_t max_offset) {
  std::seed_seq mixed{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), static_cast<uint32_t>(epoch),
                      static_cast<uint32_t>(static_cast<uint64_t>(epoch) >> 32)};
  std::mt19937_64 random(mixed);
  EpochOrder order;
  order.offset = draw(random, max_offset + 1);
  order.window.resize(windows);
  std::iota(order.window.begin(), order.window.end(), 0);
  for (int64_t i = windows - 1; i > 0; --i) std::swap(order.window[i], order.window[draw(random, i + 1)]);
  return order;
}

WindowSampler::WindowSampler(int64_t text_numel, int64_t context, uint64_t seed, BatchShape shape)
    : window_numel_(context + 1), seed_(seed), shape_(shape) {
  // As many windows as fit from every offset in [0, context], so that all epochs are alike; a text
  // too short for that keeps one window and has fewer offsets.
  windows_ = std::max<int64_t>(1, (text_numel - context) / window_numel_);
  max_offset_ = std::min(context, text_numel - windows_ * window_numel_);
}

std::vector<int64_t> WindowSampler::starts(int64_t step, int64_t micro_batch, int64_t rank) {
  const int64_t first = step * shape_.global() + rank * shape_.per_rank() + micro_batch * shape_.batch;
  std::vector<int64_t> starts(shape_.batch);
  for (int64_t i = 0; i < shape_.batch; ++i) starts[i] = start_of(first + i);
  return starts;
}

int64_t WindowSampler::start_of(int64_t position) {
  const int64_t epoch = position / windows_;
  if (epoch != cached_epoch_) {
    cached_order_ = make_epoch_order(seed_, epoch, windows_, max_offset_);
    cached_epoch_ = epoch;
  }
  return cached_order_.offset + cached_order_.window[position % windows_] * window_numel_;
}

std::vector<int64_t> validation_starts(int64_t text_numel, int64_t context, int64_t count) {
  const int64_t available = text_numel / (context + 1);
  const int64_t taken = std::min(count, available);
  std::vector<int64_t> starts(taken);
  for (int64_t i = 0; i < taken; ++i) starts[i] = i * available / taken * (context + 1);
  return starts;
}

}  // namespace train_gpt
