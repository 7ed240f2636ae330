#include <tessera/plan/decoder.h>

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <c10/util/StringUtil.h>

#include <charconv>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

#include <tessera/checkpointed.h>
#include "core/runtime/lfs_pointer.h"
#include "core/runtime/require.h"

namespace tessera {
using namespace internal;
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

int64_t features_of(const DecoderOptions& options) {
  return options.head_dim > 0 ? options.head_dim : options.width / options.heads;
}

// Computes an RMS norm. As in Llama, computes in fp32 even if `x` has 16 bits. The result has the dtype of `x`.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight) {
  const at::Tensor exact = x.to(at::kFloat);
  return (exact * at::rsqrt(exact.pow(2).mean(-1, /*keepdim=*/true) + 1e-5)).to(x.scalar_type()) * weight;
}

// Applies rotary position embeddings to `x` of shape [batch, heads, sequence, features].
at::Tensor rotate(const at::Tensor& x) {
  const int64_t half = x.size(3) / 2;
  const auto frequencies = at::pow(10000.0, at::arange(half, at::kFloat) / -static_cast<double>(half));
  const auto angles = at::outer(at::arange(x.size(2), at::kFloat), frequencies);
  const auto cos = at::cat({angles.cos(), angles.cos()}, 1).to(x.scalar_type());
  const auto sin = at::cat({angles.sin(), angles.sin()}, 1).to(x.scalar_type());
  return x * cos + at::cat({-x.narrow(3, half, half), x.narrow(3, 0, half)}, 3) * sin;
}

// Reads a model's config.json, with the field names of Hugging Face's transformers.
class ConfigFile {
 public:
  explicit ConfigFile(const std::filesystem::path& file) : file_(file.string()) {
    std::ifstream stream(file);
    if (!stream || std::filesystem::is_directory(file)) refuse(file_ + " cannot be read");
    const std::string text(std::istreambuf_iterator<char>(stream), {});
    if (const std::string problem = lfs_problem(text); !problem.empty()) refuse(file_ + " " + problem);
    config_ = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!config_.is_object()) refuse(file_ + " is not a JSON object, as Hugging Face's config.json is");
  }

  bool has(const char* name) const { return config_.contains(name) && !config_[name].is_null(); }
  int64_t number(const char* name) const {
    if (!has(name)) refuse(file_ + " has no " + name);
    if (!config_[name].is_number_integer()) refuse(file_ + ": " + name + " is no whole number");
    return config_[name].get<int64_t>();
  }
  int64_t number(const char* name, int64_t otherwise) const { return has(name) ? number(name) : otherwise; }
  bool flag(const char* name, bool otherwise) const {
    if (!has(name)) return otherwise;
    if (!config_[name].is_boolean()) refuse(file_ + ": " + name + " is neither true nor false");
    return config_[name].get<bool>();
  }
  double share(const char* name, double otherwise) const {
    if (!has(name)) return otherwise;
    if (!config_[name].is_number()) refuse(file_ + ": " + name + " is no number");
    return config_[name].get<double>();
  }
  std::string text(const char* name) const {
    return has(name) && config_[name].is_string() ? config_[name].get<std::string>() : "";
  }
  [[noreturn]] void cannot_plan(const std::string& what) const { refuse(file_ + ": " + what); }

 private:
  const std::string file_;
  nlohmann::json config_;
};

// Returns a list of the model's dropouts, or "". Plans omit dropout, but report the list, because masks need memory.
std::string dropouts_of(const ConfigFile& config, std::initializer_list<std::pair<const char*, double>> usual) {
  std::string text;
  for (const auto& [name, otherwise] : usual)
    if (config.share(name, otherwise) > 0) text += (text.empty() ? "dropout (" : ", ") + std::string(name);
  return text.empty() ? text : text + ")";
}

DecoderOptions gpt2_of(const ConfigFile& config, int64_t sequence) {
  DecoderOptions options;
  options.layers = config.number("n_layer");
  options.width = config.number("n_embd");
  options.heads = config.number("n_head");
  options.mlp_width = config.number("n_inner", 0);
  options.positions = config.number("n_positions");
  options.sequence = sequence > 0 ? sequence : options.positions;
  options.tie = config.flag("tie_word_embeddings", true);
  if (config.flag("add_cross_attention", false)) config.cannot_plan("add_cross_attention is true");
  options.left_out = dropouts_of(config, {{"resid_pdrop", 0.1}, {"embd_pdrop", 0.1}, {"attn_pdrop", 0.1}});
  return options;
}

DecoderOptions llama_of(const ConfigFile& config, int64_t sequence, const std::string& kind) {
  const bool is_mistral = kind == "mistral", is_qwen = kind == "qwen2" || kind == "qwen3";
  DecoderOptions options;
  options.is_llama = true;
  options.layers = config.number("num_hidden_layers");
  options.width = config.number("hidden_size");
  options.heads = config.number("num_attention_heads");
  // Requires the field for Qwen, because the default in transformers is right for only one published model.
  options.key_value_heads =
      is_qwen ? config.number("num_key_value_heads") : config.number("num_key_value_heads", is_mistral ? 8 : 0);
  options.head_dim = config.number("head_dim", kind == "qwen3" ? 128 : 0);
  options.mlp_width = config.number("intermediate_size");
  options.sequence = sequence > 0 ? sequence : config.number("max_position_embeddings");
  options.tie = config.flag("tie_word_embeddings", false);
  // Ignores `attention_bias` for Mistral and Qwen2, like transformers.
  options.attention_bias = (kind == "llama" || kind == "qwen3") && config.flag("attention_bias", false);
  options.mlp_bias = kind == "llama" && config.flag("mlp_bias", false);
  options.input_bias = kind == "qwen2";
  options.head_norms = kind == "qwen3";
  const bool has_window = is_mistral || (is_qwen && config.flag("use_sliding_window", false));
  const int64_t window = has_window ? config.number("sliding_window", options.sequence) : options.sequence;
  if (window < options.sequence)
    config.cannot_plan(c10::str("sliding_window is ", window, ", less than the sequence of ", options.sequence,
                                ": a plan's attention sees all of it; take --sequence ", window));
  options.left_out = dropouts_of(config, {{"attention_dropout", 0.0}});
  return options;
}

}  // namespace

const DecoderOptions& checked(const DecoderOptions& options) {
  const std::map<std::string, int64_t> values = {{"layers", options.layers},     {"width", options.width},
                                                 {"heads", options.heads},       {"vocab", options.vocabulary},
                                                 {"sequence", options.sequence}, {"batch", options.batch}};
  for (const auto& [name, value] : values) require(value >= 1, "model of ", name, " ", value, ", expected 1 or more");
  constexpr int64_t kMostLayers = 1000;  // a dry run takes time for each layer
  require(options.layers <= kMostLayers, "model of layers ", options.layers, ", expected at most ", kMostLayers);
  require(options.head_dim >= 0 && (!options.is_llama || options.head_dim % 2 == 0), "model of head_dim ",
          options.head_dim, ", expected ", options.is_llama ? "an even number" : "0 or more");
  const bool divides =
      options.width % options.heads == 0 && (!options.is_llama || options.width / options.heads % 2 == 0);
  require(options.head_dim > 0 || divides, "model of width ", options.width, ", which does not divide into ",
          options.heads, " heads");
  const int64_t shared = options.key_value_heads;
  require(shared == 0 || (shared > 0 && options.heads % shared == 0), "model of ", shared,
          " heads of keys and values, expected a divisor of ", options.heads);
  require(options.positions == 0 || options.positions >= options.sequence, "model of ", options.positions,
          " positions, fewer than the sequence of ", options.sequence);
  require(options.mlp_width >= 0, "model of mlp ", options.mlp_width, ", expected 0 or more");
  return options;
}

DecoderOptions decoder_of(const std::string& text) {
  const size_t colon = text.find(':');
  const std::string kind = text.substr(0, colon);
  if (colon == std::string::npos || (kind != "gpt" && kind != "llama"))
    refuse(
        "'" + text +
        "', expected gpt:name=number,... or llama:name=number,... (tessera plan also takes a config.json, or a folder "
        "that has it, and an archive of torch.export, .pt2)");
  DecoderOptions options;
  options.is_llama = kind == "llama";
  int64_t tie = options.is_llama ? 0 : 1;
  std::map<std::string, int64_t*> fields = {{"layers", &options.layers},     {"width", &options.width},
                                            {"heads", &options.heads},       {"kv_heads", &options.key_value_heads},
                                            {"mlp", &options.mlp_width},     {"vocab", &options.vocabulary},
                                            {"head_dim", &options.head_dim}, {"sequence", &options.sequence},
                                            {"batch", &options.batch},       {"tie", &tie}};
  for (size_t begin = colon + 1; begin < text.size() || text[begin - 1] == ',';) {
    const std::string part = text.substr(begin, text.find(',', begin) - begin);
    begin += part.size() + 1;
    const size_t equals = part.find('=');
    const auto field = fields.extract(part.substr(0, equals));
    if (equals == std::string::npos || !field)
      refuse("'" + text + "': '" + part +
             "', expected layers, width, heads, kv_heads, head_dim, mlp, vocab, sequence, batch or tie, each =number "
             "and at most once");
    *field.mapped() = number_of(text, part.substr(equals + 1));
  }
  if (tie != 0 && tie != 1) refuse("'" + text + "': tie is 0 or 1");
  options.tie = tie == 1;
  return checked(options);
}

DecoderOptions decoder_of_config(const std::filesystem::path& file, int64_t sequence, int64_t batch) {
  const ConfigFile config(file);
  const std::string kind = config.text("model_type");
  if (kind != "gpt2" && kind != "llama" && kind != "mistral" && kind != "qwen2" && kind != "qwen3")
    config.cannot_plan("model_type is '" + kind + "', expected gpt2, llama, mistral, qwen2 or qwen3");
  if (config.has("quantization_config")) config.cannot_plan("quantization_config: its weights are not trained");
  DecoderOptions options = kind == "gpt2" ? gpt2_of(config, sequence) : llama_of(config, sequence, kind);
  options.vocabulary = config.number("vocab_size");
  options.batch = batch;
  return checked(options);
}

DecoderBlockImpl::DecoderBlockImpl(const DecoderOptions& options) : options_(options) {
  const bool attention_bias = !options.is_llama || options.attention_bias;
  const bool input_bias = attention_bias || options.input_bias;
  const bool mlp_bias = !options.is_llama || options.mlp_bias;
  const int64_t features = features_of(options);
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
  query_ = register_module("query", linear(width, options.heads * features, input_bias));
  key_value_ = register_module("key_value", linear(width, 2 * shared * features, input_bias));
  if (options.head_norms) {
    query_norm_ = register_parameter("query_norm", at::ones({features}));
    key_norm_ = register_parameter("key_norm", at::ones({features}));
  }
  out_ = register_module("out", linear(options.heads * features, width, attention_bias));
  if (options.is_llama) gate_ = register_module("gate", linear(width, mlp, mlp_bias));
  up_ = register_module("up", linear(width, mlp, mlp_bias));
  down_ = register_module("down", linear(mlp, width, mlp_bias));
}

at::Tensor DecoderBlockImpl::norm(const at::Tensor& x, int which) {
  const auto index = static_cast<size_t>(which);
  return options_.is_llama ? rms_norm(x, rms_weights_[index]) : layer_norms_[index]->forward(x);
}

at::Tensor DecoderBlockImpl::attend(const at::Tensor& x) {
  const int64_t batch = x.size(0), length = x.size(1), features = features_of(options_);
  const int64_t shared = options_.key_value_heads > 0 ? options_.key_value_heads : options_.heads;
  auto query = query_->forward(x).view({batch, length, options_.heads, features}).transpose(1, 2);
  const auto both = key_value_->forward(x).view({batch, length, 2, shared, features}).permute({2, 0, 3, 1, 4});
  auto key = both[0], value = both[1];
  if (options_.head_norms) query = rms_norm(query, query_norm_), key = rms_norm(key, key_norm_);
  if (options_.is_llama) query = rotate(query), key = rotate(key);
  if (shared != options_.heads) {
    key = key.repeat_interleave(options_.heads / shared, 1);
    value = value.repeat_interleave(options_.heads / shared, 1);
  }
  const auto mixed = at::scaled_dot_product_attention(query, key, value, {}, 0.0, /*is_causal=*/true);
  return out_->forward(mixed.transpose(1, 2).reshape({batch, length, options_.heads * features}));
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
    positions_ = register_module(
        "positions", torch::nn::Embedding(options.positions > 0 ? options.positions : options.sequence, options.width));
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
