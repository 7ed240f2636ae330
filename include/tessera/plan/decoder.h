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

// Options of a transformer language model like GPT-2 or Llama, for plans that do not use the user's own model.
struct DecoderOptions {
  int64_t layers = 12;
  int64_t width = 768;
  int64_t heads = 12;
  int64_t key_value_heads = 0;  // heads of keys and values; 0: `heads`
  int64_t head_dim = 0;         // size of each head; 0: width / heads
  int64_t mlp_width = 0;        // inner size of the MLP; 0: 4 * width
  int64_t vocabulary = 50257;
  int64_t sequence = 1024;  // tokens of one item
  int64_t batch = 1;        // items of one rank in one step
  // true: Llama's RMS norms, rotary positions and gated MLPs without biases. false: GPT-2's layer norms, learned
  // positions and biases.
  bool is_llama = false;
  bool tie = true;              // true: the output layer shares the weight of the token embedding
  int64_t positions = 0;        // GPT-2: rows of the table of positions; 0: `sequence`
  bool attention_bias = false;  // Llama: biases in the four projections of attention
  bool input_bias = false;      // Llama: biases for queries, keys and values, as in Qwen2
  bool head_norms = false;      // Llama: norms of each head's query and key, as in Qwen3
  bool mlp_bias = false;        // Llama: biases in the MLP
  std::string left_out = {};    // features of the config file that the plan omits, as text
};

// Parses "gpt:layers=80,width=8192,heads=64" or "llama:...". The text may set fields of DecoderOptions, some by short
// names (kv_heads, head_dim, mlp, vocab, sequence, batch, tie=0|1). Defaults are those of DecoderOptions, except tie=0
// for llama. Throws std::invalid_argument that names the invalid part of the text.
DecoderOptions decoder_of(const std::string& text);

// Reads a Hugging Face config.json with model_type gpt2, llama, mistral, qwen2 or qwen3. The model has as many
// parameters as in transformers. `sequence` 0 means the file's full context. Throws std::invalid_argument, naming file
// and field, for missing fields, wrong types, and unsupported features. These are an attention window shorter than the
// sequence, cross attention, quantized weights, and fewer positions than the sequence.
DecoderOptions decoder_of_config(const std::filesystem::path& file, int64_t sequence, int64_t batch);

// Returns the options. Throws std::invalid_argument if they define no valid model, or more than 1000 layers.
const DecoderOptions& checked(const DecoderOptions& options);

// One layer: attention and MLP, each after a norm and with a residual connection.
class DecoderBlockImpl : public torch::nn::Module {
 public:
  // `options` must be checked().
  explicit DecoderBlockImpl(const DecoderOptions& options);
  at::Tensor forward(const at::Tensor& x);  // [batch, sequence, width] -> the same shape

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

// The whole model: embeddings, layers, a norm and the output layer.
class DecoderImpl : public torch::nn::Module {
 public:
  // `checkpoints`: if true, each layer's activations are recomputed in backward (checkpointed()).
  explicit DecoderImpl(const DecoderOptions& options, bool checkpoints = false);
  at::Tensor forward(const at::Tensor& tokens);  // int64 [batch, sequence] -> [batch * sequence, vocabulary]

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
