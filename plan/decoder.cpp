#include "tessera/plan/decoder.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>

#include <charconv>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "tessera/recompute/checkpointed.h"

namespace tessera {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("model " + what); }

int64_t number_of(const std::string& text, const std::string& part) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), number);
  if (error != std::errc() || end != part.data() + part.size())
    refuse("'" + text + "': '" + part + "' is no whole number");
  return number;
}

torch::nn::Linear linear(int64_t in, int64_t out, bool bias) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(bias));
}

// In fp32 where x has 16 bit, as Llama's.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight) {
  const at::Tensor exact = x.to(at::kFloat);
  return (exact * at::rsqrt(exact.pow(2).mean(-1, /*keepdim=*/true) + 1e-5)).to(x.scalar_type()) * weight;
}

// x [batch, heads, sequence, features], turned by angles [sequence, features / 2].
at::Tensor rotate(const at::Tensor& x) {
  const int64_t half = x.size(3) / 2;
  const auto frequencies = at::pow(10000.0, at::arange(half, at::kFloat) / -static_cast<double>(half));
  const auto angles = at::outer(at::arange(x.size(2), at::kFloat), frequencies);
  const auto cos = at::cat({angles.cos(), angles.cos()}, 1).to(x.scalar_type());
  const auto sin = at::cat({angles.sin(), angles.sin()}, 1).to(x.scalar_type());
  return x * cos + at::cat({-x.narrow(3, half, half), x.narrow(3, 0, half)}, 3) * sin;
}

}  // namespace

const DecoderOptions& checked(const DecoderOptions& options) {
  const std::map<std::string, int64_t> values = {{"layers", options.layers},     {"width", options.width},
                                                 {"heads", options.heads},       {"vocab", options.vocabulary},
                                                 {"sequence", options.sequence}, {"batch", options.batch}};
  for (const auto& [name, value] : values)
    if (value < 1) refuse("of " + name + " " + std::to_string(value) + ", expected 1 or more");
  if (options.width % options.heads != 0 || (options.is_llama && options.width / options.heads % 2 != 0))
    refuse("of width " + std::to_string(options.width) + ", which does not divide into " +
           std::to_string(options.heads) + " heads");
  const int64_t shared = options.key_value_heads;
  if (shared < 0 || (shared > 0 && options.heads % shared != 0))
    refuse("of " + std::to_string(shared) + " heads of keys and values, expected a divisor of " +
           std::to_string(options.heads));
  if (options.mlp_width < 0) refuse("of mlp " + std::to_string(options.mlp_width) + ", expected 0 or more");
  return options;
}

DecoderOptions decoder_of(const std::string& text) {
  const size_t colon = text.find(':');
  const std::string kind = text.substr(0, colon);
  if (colon == std::string::npos || (kind != "gpt" && kind != "llama"))
    refuse("'" + text + "', expected gpt:name=number,... or llama:name=number,...");
  DecoderOptions options;
  options.is_llama = kind == "llama";
  options.tie = !options.is_llama;
  std::map<std::string, int64_t*> fields = {{"layers", &options.layers},     {"width", &options.width},
                                            {"heads", &options.heads},       {"kv_heads", &options.key_value_heads},
                                            {"mlp", &options.mlp_width},     {"vocab", &options.vocabulary},
                                            {"sequence", &options.sequence}, {"batch", &options.batch}};
  for (size_t begin = colon + 1; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    begin = end + 1;
    const size_t equals = part.find('=');
    const std::string name = part.substr(0, equals);
    const bool is_tie = name == "tie";
    if (equals == std::string::npos || (!is_tie && !fields.contains(name)))
      refuse("'" + text + "': '" + part +
             "', expected layers, width, heads, kv_heads, mlp, vocab, sequence, batch or tie, each =number");
    const int64_t number = number_of(text, part.substr(equals + 1));
    if (is_tie && number != 0 && number != 1) refuse("'" + text + "': tie is 0 or 1");
    is_tie ? static_cast<void>(options.tie = number == 1) : static_cast<void>(*fields[name] = number);
  }
  return checked(options);
}

DecoderOptions decoder_of_config(const std::filesystem::path& file, int64_t sequence, int64_t batch) {
  std::ifstream stream(file);
  if (!stream) refuse(file.string() + " cannot be read");
  const auto config = nlohmann::json::parse(stream, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) refuse(file.string() + " is not a JSON object, as Hugging Face's config.json is");
  const std::string kind = config.value("model_type", "");
  const bool is_gpt2 = kind == "gpt2";
  if (!is_gpt2 && kind != "llama" && kind != "mistral")
    refuse(file.string() + ": model_type is '" + kind + "', expected gpt2, llama or mistral");
  const auto field = [&](const char* name, int64_t otherwise) {
    if (!config.contains(name) || config[name].is_null()) {
      if (otherwise >= 0) return otherwise;
      refuse(file.string() + " has no " + name);
    }
    if (!config[name].is_number_integer()) refuse(file.string() + ": " + name + " is no whole number");
    return config[name].get<int64_t>();
  };
  constexpr int64_t kRequired = -1;
  DecoderOptions options;
  options.is_llama = !is_gpt2;
  options.layers = field(is_gpt2 ? "n_layer" : "num_hidden_layers", kRequired);
  options.width = field(is_gpt2 ? "n_embd" : "hidden_size", kRequired);
  options.heads = field(is_gpt2 ? "n_head" : "num_attention_heads", kRequired);
  options.key_value_heads = is_gpt2 ? 0 : field("num_key_value_heads", 0);
  options.mlp_width = field(is_gpt2 ? "n_inner" : "intermediate_size", is_gpt2 ? 0 : kRequired);
  options.vocabulary = field("vocab_size", kRequired);
  options.sequence = sequence > 0 ? sequence : field(is_gpt2 ? "n_positions" : "max_position_embeddings", kRequired);
  options.batch = batch;
  options.tie = config.value("tie_word_embeddings", is_gpt2);
  return checked(options);
}

DecoderBlockImpl::DecoderBlockImpl(const DecoderOptions& options) : options_(options) {
  const bool bias = !options.is_llama;
  const int64_t width = options.width, mlp = options.mlp_width > 0 ? options.mlp_width : 4 * width;
  const int64_t shared = options.key_value_heads > 0 ? options.key_value_heads : options.heads;
  for (int which = 0; which < 2; ++which) {
    const std::string name = which == 0 ? "attention_norm" : "mlp_norm";
    if (options.is_llama) {
      rms_weights_.push_back(register_parameter(name, at::ones({width})));
    } else {
      layer_norms_.push_back(register_module(name, torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}))));
    }
  }
  query_ = register_module("query", linear(width, width, bias));
  key_value_ = register_module("key_value", linear(width, 2 * shared * (width / options.heads), bias));
  out_ = register_module("out", linear(width, width, bias));
  if (options.is_llama) gate_ = register_module("gate", linear(width, mlp, false));
  up_ = register_module("up", linear(width, mlp, bias));
  down_ = register_module("down", linear(mlp, width, bias));
}

at::Tensor DecoderBlockImpl::norm(const at::Tensor& x, int which) {
  const auto index = static_cast<size_t>(which);
  return options_.is_llama ? rms_norm(x, rms_weights_[index]) : layer_norms_[index]->forward(x);
}

at::Tensor DecoderBlockImpl::attend(const at::Tensor& x) {
  const int64_t batch = x.size(0), length = x.size(1), features = options_.width / options_.heads;
  const int64_t shared = options_.key_value_heads > 0 ? options_.key_value_heads : options_.heads;
  auto query = query_->forward(x).view({batch, length, options_.heads, features}).transpose(1, 2);
  const auto both = key_value_->forward(x).view({batch, length, 2, shared, features}).permute({2, 0, 3, 1, 4});
  auto key = both[0], value = both[1];
  if (options_.is_llama) query = rotate(query), key = rotate(key);
  if (shared != options_.heads) {
    key = key.repeat_interleave(options_.heads / shared, 1);
    value = value.repeat_interleave(options_.heads / shared, 1);
  }
  const auto mixed = at::scaled_dot_product_attention(query, key, value, {}, 0.0, /*is_causal=*/true);
  return out_->forward(mixed.transpose(1, 2).reshape({batch, length, options_.width}));
}

at::Tensor DecoderBlockImpl::forward(const at::Tensor& x) {
  const auto attended = x + attend(norm(x, 0));
  const auto y = norm(attended, 1);
  const auto inner = gate_ ? at::silu(gate_->forward(y)) * up_->forward(y) : at::gelu(up_->forward(y), "tanh");
  return attended + down_->forward(inner);
}

DecoderImpl::DecoderImpl(const DecoderOptions& options, bool checkpoints)
    : options_(checked(options)), checkpoints_(checkpoints) {
  tokens_ = register_module("tokens", torch::nn::Embedding(options.vocabulary, options.width));
  if (!options.is_llama)
    positions_ = register_module("positions", torch::nn::Embedding(options.sequence, options.width));
  blocks_ = register_module("blocks", torch::nn::ModuleList());
  for (int64_t layer = 0; layer < options.layers; ++layer) blocks_->push_back(DecoderBlock(options));
  if (options.is_llama) {
    rms_weight_ = register_parameter("norm", at::ones({options.width}));
  } else {
    norm_ = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width})));
  }
  if (!options.tie) head_ = register_module("head", linear(options.width, options.vocabulary, false));
}

at::Tensor DecoderImpl::forward(const at::Tensor& tokens) {
  at::Tensor x = tokens_->forward(tokens);
  if (positions_) x = x + positions_->forward(at::arange(tokens.size(1), tokens.options()));
  for (const auto& each : *blocks_) {
    const auto block = std::dynamic_pointer_cast<DecoderBlockImpl>(each);
    x = checkpoints_ ? checkpointed(block, x) : block->forward(x);
  }
  x = (norm_ ? norm_->forward(x) : rms_norm(x, rms_weight_)).flatten(0, 1);
  return head_ ? head_->forward(x) : at::linear(x, tokens_->weight);
}

}  // namespace tessera
