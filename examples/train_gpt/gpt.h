#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <optional>

namespace tessera {
class ModelShards;
}  // namespace tessera

namespace train_gpt {

struct GptOptions {
  int64_t vocabulary = 256;
  int64_t layers = 4;
  int64_t width = 128;        // features of a token between blocks
  int64_t heads = 4;          // must divide width
  int64_t context = 128;      // the longest sequence
  bool tie = false;           // the head's weight is the token embedding's
  bool checkpointed = false;  // backward recomputes each block from its input (activation checkpointing)

  // Some published GPT-2 models need other values of the following options.
  double norm_epsilon = 1e-5;             // added to variances
  bool scale_attention = true;            // scores are divided by the root of a head's features
  bool scale_attention_by_layer = false;  // scores are also divided by the number of the layer, from 1
};

// Multi-head attention in which each token attends to itself and to earlier tokens.
class CausalSelfAttentionImpl : public torch::nn::Module {
 public:
  CausalSelfAttentionImpl(const GptOptions& options, int64_t layer);  // layer: from 0
  at::Tensor forward(const at::Tensor& x);                            // [B, T, width] -> [B, T, width]

 private:
  int64_t heads_;
  std::optional<double> scale_;  // of scores; default: 1 / sqrt(features of a head)
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

// A decoder-only language model like GPT-2, without dropout. Uses only torch::nn, and no ranks or collectives. Draws
// its initial values from torch's default generator.
class GptImpl : public torch::nn::Module {
 public:
  // Throws std::invalid_argument for sizes below 1 or a width that the heads do not divide.
  explicit GptImpl(const GptOptions& options);

  // Maps int64 tokens [B, T] to logits [B, T, vocabulary]. T must be at most `context`. Logits t predict token t + 1.
  at::Tensor forward(const at::Tensor& tokens);

  const GptOptions& options() const { return options_; }

 private:
  void initialize();

  GptOptions options_;
  torch::nn::Embedding token_embedding_{nullptr};     // [vocabulary, width]
  torch::nn::Embedding position_embedding_{nullptr};  // [context, width]
  torch::nn::ModuleList blocks_{nullptr};
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear head_{nullptr};  // [vocabulary, width]; empty if tied
};
TORCH_MODULE(Gpt);

// Import and export of Hugging Face's GPT2LMHeadModel: a directory with config.json and model.safetensors. Its linear
// layers hold transposed weights. Both are collective, and throw tessera::CheckpointError.

// Writes such a directory from a model under any wrapper. Rank 0 renames and transposes one tensor at a time.
void export_gpt2(const std::filesystem::path& directory, tessera::ModelShards& model, const GptOptions& options);

// Loads such a directory: one file, or several with an index, of any floating dtype. Each rank reads its own part.
// Throws if settings in config.json differ from `options`: those of read_gpt2_options() that no tensor's shape shows.
void import_gpt2(const std::filesystem::path& directory, tessera::ModelShards& model, const GptOptions& options);

// Returns the options of the model in config.json. Throws tessera::CheckpointError if it is not a GPT-2.
GptOptions read_gpt2_options(const std::filesystem::path& directory);

}  // namespace train_gpt
