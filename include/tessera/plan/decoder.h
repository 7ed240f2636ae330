#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace tessera {

// A transformer that predicts tokens, as GPT-2 or Llama: what a plan trains instead of the user's own.
struct DecoderOptions {
  int64_t layers = 12;
  int64_t width = 768;
  int64_t heads = 12;
  int64_t key_value_heads = 0;  // fewer than `heads` share keys and values; 0: as many
  int64_t head_dim = 0;         // 0: width / heads
  int64_t mlp_width = 0;        // 0: 4 * width
  int64_t vocabulary = 50257;
  int64_t sequence = 1024;  // tokens of one item
  int64_t batch = 1;        // items a rank and step
  // Llama's: root-mean-square norms, rotary positions and gated MLPs without biases. GPT-2's: layer norms, positions
  // that are learned, biases.
  bool is_llama = false;
  bool tie = true;              // the output layer is the table of tokens
  int64_t positions = 0;        // GPT-2: of the learned table; 0: as many as the sequence
  bool attention_bias = false;  // Llama: in the four products of attention
  bool input_bias = false;      // Llama: in those of queries, keys and values, as Qwen2's
  bool head_norms = false;      // Llama: norms of each head's query and key, as Qwen3's
  bool mlp_bias = false;        // Llama: in the products of the MLP
  std::string left_out = {};    // of a file's model: what it has beside this, for people; "" for nothing
};

// "gpt:layers=80,width=8192,heads=64" or "llama:..."; names of DecoderOptions (kv_heads, head_dim, mlp, vocab,
// sequence, batch, tie=0|1), what is left out as above (llama: not tied). Throws std::invalid_argument, naming the
// part.
DecoderOptions decoder_of(const std::string& text);

// Hugging Face's config.json of a model_type gpt2, llama, mistral, qwen2 or qwen3, with as many parameters as
// transformers makes of it. `batch` and, unless the file's full context is meant (0), `sequence` are the caller's.
// Throws std::invalid_argument, naming the file and the field: for what is missing or of another type, and for what
// would be planned wrongly (a window of attention shorter than the sequence, cross attention, quantized weights, more
// positions than there are).
DecoderOptions decoder_of_config(const std::filesystem::path& file, int64_t sequence, int64_t batch);

// The options; throws std::invalid_argument for ones that make no model.
const DecoderOptions& checked(const DecoderOptions& options);

// One layer: attention and MLP, each behind a norm and added to its input.
class DecoderBlockImpl : public torch::nn::Module {
 public:
  // Of checked options.
  explicit DecoderBlockImpl(const DecoderOptions& options);
  at::Tensor forward(const at::Tensor& x);  // [batch, sequence, width], the same

 private:
  at::Tensor attend(const at::Tensor& x);
  at::Tensor norm(const at::Tensor& x, int which);

  const DecoderOptions options_;
  std::vector<torch::nn::LayerNorm> layer_norms_;
  std::vector<at::Tensor> rms_weights_;
  at::Tensor query_norm_, key_norm_;
  torch::nn::Linear query_{nullptr}, key_value_{nullptr}, out_{nullptr}, gate_{nullptr}, up_{nullptr}, down_{nullptr};
};
TORCH_MODULE(DecoderBlock);

// The whole model: tokens, layers, a norm and the output layer.
class DecoderImpl : public torch::nn::Module {
 public:
  // checkpoints: each layer is computed again in backward (checkpointed()).
  explicit DecoderImpl(const DecoderOptions& options, bool checkpoints = false);
  at::Tensor forward(const at::Tensor& tokens);  // [batch, sequence] of int64 to [batch * sequence, vocabulary]

 private:
  const DecoderOptions options_;
  const bool checkpoints_;
  torch::nn::Embedding tokens_{nullptr}, positions_{nullptr};
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm norm_{nullptr};
  at::Tensor rms_weight_;
  torch::nn::Linear head_{nullptr};
};
TORCH_MODULE(Decoder);

}  // namespace tessera
