#include "gpt.h"

#include <cmath>
#include <stdexcept>
#include <string>

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
  const auto qkv = qkv_->forward(x).view({batch, length, 3, heads_, width / heads_}).permute({2, 0, 3, 1, 4});
  const auto mixed = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                                      /*is_causal=*/true, scale_);
  return projection_->forward(mixed.transpose(1, 2).reshape({batch, length, width}));
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
  return attended + projection_->forward(at::gelu(expand_->forward(mlp_norm_->forward(attended)), "tanh"));
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

// As GPT-2: normal weights, smaller ones where a block adds to the residual stream, so that its
// variance does not grow with the number of layers. GPT-2's standard deviation of 0.02 is about
// 1 / sqrt(width) for its width of 1600; taken as it is, a narrow model learns words far later.
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
  for (const auto& block : *blocks_) x = block->as<BlockImpl>()->forward(x);
  x = norm_->forward(x);
  return head_ ? head_->forward(x) : at::linear(x, token_embedding_->weight);
}

}  // namespace train_gpt
