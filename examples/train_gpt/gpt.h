#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <optional>

namespace train_gpt {

struct GptOptions {
  int64_t vocabulary = 256;
  int64_t layers = 4;
  int64_t width = 128;    // features of a token between blocks
  int64_t heads = 4;      // must divide width
  int64_t context = 128;  // the longest sequence
  bool tie = false;       // the head's weight is the token embedding's

  // What some GPT-2 of others have otherwise.
  double norm_epsilon = 1e-5;             // added to variances
  bool scale_attention = true;            // scores are divided by the root of a head's features
  bool scale_attention_by_layer = false;  // and by the number of the layer, from 1
};

// Each token looks at itself and at those before it.
class CausalSelfAttentionImpl : public torch::nn::Module {
 public:
  CausalSelfAttentionImpl(const GptOptions& options, int64_t layer);  // layer: from 0
  at::Tensor forward(const at::Tensor& x);                            // [B, T, width] -> [B, T, width]

 private:
  int64_t heads_;
  std::optional<double> scale_;  // of scores; not given: as usual
  torch::nn::Linear qkv_{nullptr};
  torch::nn::Linear projection_{nullptr};
};
TORCH_MODULE(CausalSelfAttention);

// One layer of the pre-norm transformer: x + attention(norm(x)), then x + mlp(norm(x)).
class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl(const GptOptions& options, int64_t layer);
  at::Tensor forward(const at::Tensor& x);  // [B, T, width] -> [B, T, width]

 private:
  torch::nn::LayerNorm attention_norm_{nullptr};
  CausalSelfAttention attention_{nullptr};
  torch::nn::LayerNorm mlp_norm_{nullptr};
  torch::nn::Linear expand_{nullptr};
  torch::nn::Linear projection_{nullptr};
};
TORCH_MODULE(Block);

// A decoder-only language model in the manner of GPT-2, without dropout. Initialised from
// torch's default generator.
class GptImpl : public torch::nn::Module {
 public:
  // Throws std::invalid_argument for sizes below 1 or a width that the heads do not divide.
  explicit GptImpl(const GptOptions& options);

  // Tokens [B, T] of int64, T at most `context`, to logits [B, T, vocabulary]: those at t predict
  // token t + 1.
  at::Tensor forward(const at::Tensor& tokens);

  const GptOptions& options() const { return options_; }

 private:
  void initialize();

  GptOptions options_;
  torch::nn::Embedding token_embedding_{nullptr};     // [vocabulary, width]
  torch::nn::Embedding position_embedding_{nullptr};  // [context, width]
  torch::nn::ModuleList blocks_{nullptr};
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear head_{nullptr};  // [vocabulary, width]; none when tied
};
TORCH_MODULE(Gpt);

}  // namespace train_gpt
