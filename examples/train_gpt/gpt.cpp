#include "gpt.h"

#include <ATen/core/grad_mode.h>
#include <tessera/checkpoint/full_file.h>
#include <tessera/checkpointed.h>
#include <tessera/errors.h>
#include <tessera/model/model_shards.h>

#include <cmath>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <utility>

#include "data.h"

namespace train_gpt {
namespace {

constexpr int64_t kMlpExpansion = 4;

torch::nn::LayerNorm make_norm(const GptOptions& options) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width}).eps(options.norm_epsilon));
}

void check(const GptOptions& options) {
  const auto at_least_one = [](int64_t value, const char* name) {
    if (value < 1) {
      throw std::invalid_argument(std::string("Gpt: ") + name + " must be at least 1, got " + std::to_string(value));
    }
  };
  at_least_one(options.vocabulary, "vocabulary");
  at_least_one(options.layers, "layers");
  at_least_one(options.width, "width");
  at_least_one(options.heads, "heads");
  at_least_one(options.context, "context");
  if (options.width % options.heads != 0) {
    throw std::invalid_argument("Gpt: a width of " + std::to_string(options.width) + " does not divide into " +
                                std::to_string(options.heads) + " heads");
  }
}

// Applies a linear layer in one operator. libtorch's Linear::forward() adds the bias in a separate operator if the
// input has three dimensions. That is slower on GPUs, above all under autocast, where product and bias have two dtypes.
at::Tensor affine(const torch::nn::Linear& linear, const at::Tensor& x) {
  return at::linear(x, linear->weight, linear->bias);
}

}  // namespace

CausalSelfAttentionImpl::CausalSelfAttentionImpl(const GptOptions& options, int64_t layer) : heads_(options.heads) {
  if (!options.scale_attention || options.scale_attention_by_layer) {
    const auto features = static_cast<double>(options.width / options.heads);
    scale_ = (options.scale_attention ? 1.0 / std::sqrt(features) : 1.0) /
             (options.scale_attention_by_layer ? static_cast<double>(layer + 1) : 1.0);
  }
  qkv_ = register_module("qkv", torch::nn::Linear(options.width, 3 * options.width));
  projection_ = register_module("projection", torch::nn::Linear(options.width, options.width));
}

at::Tensor CausalSelfAttentionImpl::forward(const at::Tensor& x) {
  const auto batch = x.size(0), length = x.size(1), width = x.size(2);
  // [B, T, 3 * width] -> query, key and value, each [B, heads, T, width / heads]
  const auto qkv = affine(qkv_, x).view({batch, length, 3, heads_, width / heads_}).permute({2, 0, 3, 1, 4});
  const auto mixed = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                                      /*is_causal=*/true, scale_);
  return affine(projection_, mixed.transpose(1, 2).reshape({batch, length, width}));
}

BlockImpl::BlockImpl(const GptOptions& options, int64_t layer) {
  attention_norm_ = register_module("attention_norm", make_norm(options));
  attention_ = register_module("attention", CausalSelfAttention(options, layer));
  mlp_norm_ = register_module("mlp_norm", make_norm(options));
  expand_ = register_module("expand", torch::nn::Linear(options.width, kMlpExpansion * options.width));
  projection_ = register_module("projection", torch::nn::Linear(kMlpExpansion * options.width, options.width));
}

at::Tensor BlockImpl::forward(const at::Tensor& x) {
  const auto attended = x + attention_->forward(attention_norm_->forward(x));
  return attended + affine(projection_, at::gelu(affine(expand_, mlp_norm_->forward(attended)), "tanh"));
}

GptImpl::GptImpl(const GptOptions& options) : options_(options) {
  check(options);
  token_embedding_ = register_module("token_embedding", torch::nn::Embedding(options.vocabulary, options.width));
  position_embedding_ = register_module("position_embedding", torch::nn::Embedding(options.context, options.width));
  blocks_ = register_module("blocks", torch::nn::ModuleList());
  for (int64_t layer = 0; layer < options.layers; ++layer) blocks_->push_back(Block(options, layer));
  norm_ = register_module("norm", make_norm(options));
  if (!options.tie) {
    head_ = register_module("head",
                            torch::nn::Linear(torch::nn::LinearOptions(options.width, options.vocabulary).bias(false)));
  }
  initialize();
}

// Draws normal weights, like GPT-2. Those of projections that add to the residual stream are smaller, so that its
// variance does not grow with the number of layers. The standard deviation is 1 / sqrt(width). GPT-2's value of 0.02 is
// about that of its width of 1600; with 0.02, a narrow model learns words far later.
void GptImpl::initialize() {
  const torch::NoGradGuard no_grad;
  const double plain_std = 1.0 / std::sqrt(static_cast<double>(options_.width));
  const double residual_std = plain_std / std::sqrt(2.0 * static_cast<double>(options_.layers));
  for (auto& item : named_modules("", /*include_self=*/false)) {
    if (auto* linear = item.value()->as<torch::nn::LinearImpl>()) {
      const bool residual = item.key().ends_with("projection");
      linear->weight.normal_(0.0, residual ? residual_std : plain_std);
      if (linear->bias.defined()) linear->bias.zero_();
    } else if (auto* embedding = item.value()->as<torch::nn::EmbeddingImpl>()) {
      embedding->weight.normal_(0.0, plain_std);
    }
  }
}

at::Tensor GptImpl::forward(const at::Tensor& tokens) {
  const auto length = tokens.size(1);
  TORCH_CHECK_VALUE(length <= options_.context, "Gpt: ", length, " tokens are more than the context of ",
                    options_.context);
  const auto positions = torch::arange(length, tokens.options());
  auto x = token_embedding_->forward(tokens) + position_embedding_->forward(positions);
  for (const auto& module : *blocks_) {
    auto* block = module->as<BlockImpl>();
    x = options_.checkpointed ? tessera::checkpointed([block](const at::Tensor& in) { return block->forward(in); }, x)
                              : block->forward(x);
  }
  x = norm_->forward(x);
  return head_ ? head_->forward(x) : at::linear(x, token_embedding_->weight);
}

namespace {

namespace fs = std::filesystem;
using tessera::CheckpointError;

constexpr char kWeights[] = "model.safetensors";

struct Translation {
  std::string name;
  bool transposed = false;
};

// Maps our names to GPT-2's.
std::map<std::string, Translation> gpt2_names(const GptOptions& options) {
  std::map<std::string, Translation> names = {{"token_embedding.weight", {"transformer.wte.weight"}},
                                              {"position_embedding.weight", {"transformer.wpe.weight"}},
                                              {"norm.weight", {"transformer.ln_f.weight"}},
                                              {"norm.bias", {"transformer.ln_f.bias"}}};
  if (!options.tie) names["head.weight"] = {"lm_head.weight"};
  const std::pair<const char*, const char*> norms[] = {{"attention_norm", "ln_1"}, {"mlp_norm", "ln_2"}};
  const std::pair<const char*, const char*> linears[] = {{"attention.qkv", "attn.c_attn"},
                                                         {"attention.projection", "attn.c_proj"},
                                                         {"expand", "mlp.c_fc"},
                                                         {"projection", "mlp.c_proj"}};
  for (int64_t layer = 0; layer < options.layers; ++layer) {
    const auto ours = "blocks." + std::to_string(layer) + ".", theirs = "transformer.h." + std::to_string(layer) + ".";
    auto add = [&](const auto& pair, bool transposed) {
      names[ours + pair.first + ".weight"] = {theirs + pair.second + ".weight", transposed};
      names[ours + pair.first + ".bias"] = {theirs + pair.second + ".bias"};
    };
    for (const auto& norm : norms) add(norm, false);
    for (const auto& linear : linears) add(linear, true);
  }
  return names;
}

nlohmann::json gpt2_config(const GptOptions& options) {
  return {{"model_type", "gpt2"},
          {"architectures", {"GPT2LMHeadModel"}},
          {"vocab_size", options.vocabulary},
          {"n_positions", options.context},
          {"n_ctx", options.context},
          {"n_embd", options.width},
          {"n_layer", options.layers},
          {"n_head", options.heads},
          {"n_inner", nullptr},
          {"activation_function", "gelu_new"},
          {"layer_norm_epsilon", options.norm_epsilon},
          {"embd_pdrop", 0.0},
          {"attn_pdrop", 0.0},
          {"resid_pdrop", 0.0},
          {"scale_attn_weights", options.scale_attention},
          {"scale_attn_by_inverse_layer_idx", options.scale_attention_by_layer},
          {"tie_word_embeddings", options.tie},
          {"bos_token_id", 0},
          {"eos_token_id", 0}};
}

}  // namespace

void export_gpt2(const fs::path& directory, tessera::ModelShards& model, const GptOptions& options) {
  const auto names = gpt2_names(options);
  tessera::save_full(directory / kWeights, model,
                     {.rename = [&](const std::string& own) { return names.at(own).name; },
                      .transposed = [&](const std::string& own) { return names.at(own).transposed; }});
  if (model.comm()->rank() == 0) {
    std::ofstream config(directory / "config.json");
    config << gpt2_config(options).dump(2) << std::endl;
    if (!config) throw CheckpointError((directory / "config.json").string() + " cannot be written");
  }
  model.comm()->barrier("exporting to " + directory.string());
}

GptOptions read_gpt2_options(const fs::path& directory) {
  const fs::path path = directory / "config.json";
  const std::string where = "--import-gpt2 " + path.string();
  std::error_code ignored;
  std::ifstream file;
  if (fs::is_regular_file(path, ignored)) file.open(path);  // opening a pipe would block
  if (!file.is_open()) throw CheckpointError(where + " cannot be read");
  const std::string text(std::istreambuf_iterator<char>(file), {});
  if (const std::string problem = lfs_problem(text); !problem.empty()) throw CheckpointError(where + ": " + problem);
  const auto config = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  GptOptions options;
  try {
    if (!config.is_object() || config.value("model_type", "") != "gpt2")
      throw CheckpointError(where + " is not that of a GPT-2");
    const auto activation = config.value("activation_function", "gelu_new");
    if (activation != "gelu_new" && activation != "gelu_pytorch_tanh")
      throw CheckpointError(where + ": the activation '" + activation + "' is not this model's gelu_new");
    options.vocabulary = config.at("vocab_size");
    options.layers = config.at("n_layer");
    options.width = config.at("n_embd");
    options.heads = config.at("n_head");
    options.context = config.at("n_positions");
    options.tie = config.value("tie_word_embeddings", true);
    options.norm_epsilon = config.value("layer_norm_epsilon", 1e-5);
    options.scale_attention = config.value("scale_attn_weights", true);
    options.scale_attention_by_layer = config.value("scale_attn_by_inverse_layer_idx", false);
    if (const auto inner = config.find("n_inner");
        inner != config.end() && !inner->is_null() && *inner != 4 * options.width)
      throw CheckpointError(where + ": n_inner is " + inner->dump() + ", this model has 4 * n_embd");
    if (config.value("add_cross_attention", false))
      throw CheckpointError(where + ": add_cross_attention is true, this model has no cross-attention");
  } catch (const nlohmann::json::exception& error) {
    throw CheckpointError(where + ": " + error.what());
  }
  return options;
}

void import_gpt2(const fs::path& directory, tessera::ModelShards& model, const GptOptions& options) {
  const GptOptions theirs = read_gpt2_options(directory);
  auto check = [&](const char* what, auto other, auto own) {
    if (other != own)
      throw CheckpointError("--import-gpt2 " + directory.string() + ": " + what + " is " +
                            nlohmann::json(other).dump() + ", the model's " + nlohmann::json(own).dump());
  };
  check("n_head", theirs.heads, options.heads);
  check("layer_norm_epsilon", theirs.norm_epsilon, options.norm_epsilon);
  check("scale_attn_weights", theirs.scale_attention, options.scale_attention);
  check("scale_attn_by_inverse_layer_idx", theirs.scale_attention_by_layer, options.scale_attention_by_layer);
  if (options.tie) check("tie_word_embeddings", theirs.tie, true);  // otherwise, the file's head would be ignored
  std::map<std::string, Translation> ours;
  for (const auto& [own, translation] : gpt2_names(options)) ours[translation.name] = {own, translation.transposed};
  // Adds the prefix, which files of GPT2Model lack. Skips the causal masks of old files, and a tied head.
  auto translated = [&](const std::string& name) -> Translation {
    const std::string full =
        name.starts_with("transformer.") || name == "lm_head.weight" ? name : "transformer." + name;
    if (full.ends_with(".attn.bias") || full.ends_with(".attn.masked_bias")) return {};
    if (full == "lm_head.weight" && options.tie) return {};
    const auto found = ours.find(full);
    return found == ours.end() ? Translation{name} : found->second;  // load_full reports unknown names
  };
  const fs::path index = directory / (std::string(kWeights) + ".index.json");
  tessera::load_full(fs::exists(index) ? index : directory / kWeights, model,
                     {.rename = [&](const std::string& name) { return translated(name).name; },
                      .transposed = [&](const std::string& name) { return translated(name).transposed; },
                      .convert_dtypes = true});
}

}  // namespace train_gpt
