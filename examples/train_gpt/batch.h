#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <span>
#include <vector>

namespace train_gpt {

struct Batch {
  at::Tensor inputs;   // [B, context], int64
  at::Tensor targets;  // [B, context], int64: at each place the token that follows the input's
};

// The windows of context + 1 tokens that start at `starts`.
Batch make_batch(std::span<const uint16_t> tokens, const std::vector<int64_t>& starts, int64_t context,
                 at::Device device);

// Mean cross-entropy in nats a token, of logits [B, T, vocabulary].
at::Tensor language_model_loss(const at::Tensor& logits, const at::Tensor& targets);

}  // namespace train_gpt
