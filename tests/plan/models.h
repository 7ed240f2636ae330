#pragma once

#include <string>
#include <utility>

#include "tests/support/reference.h"

// Small networks with the kinds of operators of real models, and sizes without common divisors.
namespace tessera::plan_tests {
using namespace internal;

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    for (const auto& [in, out] : {std::pair{97, 203}, {203, 151}, {151, 11}})
      layers->push_back(torch::nn::Linear(in, out));
    register_module("layers", layers);
  }
  at::Tensor forward(at::Tensor x) {
    x = torch::relu(layers[0]->as<torch::nn::Linear>()->forward(x));
    return layers[2]->as<torch::nn::Linear>()->forward(torch::tanh(layers[1]->as<torch::nn::Linear>()->forward(x)));
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Mlp);

struct ConvNetImpl : torch::nn::Module {
  ConvNetImpl() {
    register_module("first", first), register_module("norm", norm);
    register_module("second", second), register_module("group_norm", group_norm), register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = torch::max_pool2d(torch::relu(norm(first(x))), 2);
    y = torch::adaptive_avg_pool2d(torch::silu(group_norm(second(y))), {2, 2});
    return head(y.flatten(1));
  }
  torch::nn::Conv2d first{torch::nn::Conv2dOptions(3, 20, 3).padding(1).bias(false)};
  torch::nn::BatchNorm2d norm{20};
  torch::nn::Conv2d second{torch::nn::Conv2dOptions(20, 36, 5).stride(2)};
  torch::nn::GroupNorm group_norm{torch::nn::GroupNormOptions(4, 36)};
  torch::nn::Linear head{4 * 36, 11};
};
TORCH_MODULE(ConvNet);

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    register_module("norm", norm), register_module("qkv", qkv), register_module("out", out);
    register_module("mlp_norm", mlp_norm), register_module("up", up), register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) {
    const int64_t batch = x.size(0), length = x.size(1), width = x.size(2);
    const auto parts = qkv(norm(x)).view({batch, length, 3, 4, width / 4}).permute({2, 0, 3, 1, 4});
    const auto mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    const auto y = x + out(mixed.transpose(1, 2).reshape({batch, length, width}));
    return y + torch::dropout(down(torch::gelu(up(mlp_norm(y)))), 0.1, is_training());
  }
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({60})}, mlp_norm{torch::nn::LayerNormOptions({60})};
  torch::nn::Linear qkv{60, 180}, out{60, 60}, up{60, 240}, down{240, 60};
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  explicit GptImpl(bool checkpointed = false) : checkpoints(checkpointed) {
    for (int i = 0; i < 3; ++i) blocks->push_back(Block());
    register_module("tokens", tokens), register_module("positions", positions);
    register_module("blocks", blocks), register_module("norm", norm);
  }
  at::Tensor forward(const at::Tensor& ids) {
    at::Tensor x = tokens(ids) + positions(torch::arange(ids.size(1)));
    for (const auto& block : *blocks) {
      const auto each = std::dynamic_pointer_cast<BlockImpl>(block);
      x = checkpoints ? checkpointed(each, x) : each->forward(x);
    }
    return at::linear(norm(x), tokens->weight).flatten(0, 1);  // tied
  }
  bool checkpoints;
  torch::nn::Embedding tokens{301, 60}, positions{24, 60};
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({60})};
};
TORCH_MODULE(Gpt);

}  // namespace tessera::plan_tests
