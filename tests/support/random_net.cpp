#include "tests/support/random_net.h"

#include <cstdlib>

namespace tessera::testing_support {
namespace {

// A module without forward: an inner node of the tree.
struct NodeImpl : torch::nn::Module {};

}  // namespace

RandomNetImpl::RandomNetImpl(unsigned seed) : random_(seed) { step_ = draw(*this, 3); }

at::Tensor RandomNetImpl::forward(at::Tensor x) { return step_(std::move(x)); }

RandomNetImpl::Step RandomNetImpl::draw(torch::nn::Module& parent, int depth) {
  if (depth == 0) return draw_leaf(parent);
  return draw_branch(parent, depth);
}

RandomNetImpl::Step RandomNetImpl::draw_branch(torch::nn::Module& parent, int depth) {
  auto node = parent.register_module(name(), std::make_shared<NodeImpl>());
  std::vector<Step> steps;
  for (int64_t i = 0, children = 1 + pick(3); i < children; ++i) steps.push_back(draw(*node, depth - 1));
  switch (pick(4)) {
    case 0:  // a residual branch
      return [steps](at::Tensor x) {
        for (const auto& step : steps) x = x + 0.5 * step(x);
        return x;
      };
    case 1:  // runs all steps twice
      return [steps](at::Tensor x) {
        for (int round = 0; round < 2; ++round)
          for (const auto& step : steps) x = step(x);
        return x;
      };
    default:
      return [steps](at::Tensor x) {
        for (const auto& step : steps) x = step(x);
        return x;
      };
  }
}

RandomNetImpl::Step RandomNetImpl::draw_plain_parameter(torch::nn::Module& parent) {
  switch (pick(5)) {
    case 0: {
      auto scale = parent.register_parameter(name(), torch::rand({}) + 0.5);  // no dimension
      return [scale](at::Tensor x) { return x * scale; };
    }
    case 1: {
      auto empty = parent.register_parameter(name(), torch::empty({0, 3}));
      return [empty](at::Tensor x) { return x + empty.sum(); };
    }
    case 2: {  // never used
      parent.register_parameter(name(), torch::randn({5, 3}));
      return [](at::Tensor x) { return torch::tanh(x); };
    }
    case 3: {  // not contiguous
      auto weight = parent.register_parameter(name(), (torch::randn({kWidth, kWidth}) * 0.3).t());
      return [weight](at::Tensor x) { return torch::tanh(torch::matmul(x, weight)); };
    }
    default: {  // frozen
      auto shift = parent.register_parameter(name(), torch::randn({kWidth}), /*requires_grad=*/false);
      return [shift](at::Tensor x) { return x + shift; };
    }
  }
}

RandomNetImpl::Step RandomNetImpl::draw_leaf(torch::nn::Module& parent) {
  switch (pick(9)) {
    case 0: {
      torch::nn::LayerNorm norm(
          parent.register_module(name(), torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth}))));
      return [norm](at::Tensor x) mutable { return norm(x); };
    }
    case 1: {
      torch::nn::BatchNorm1d norm(parent.register_module(name(), torch::nn::BatchNorm1d(kWidth)));
      return [norm](at::Tensor x) mutable { return norm(x); };
    }
    case 2: {
      torch::nn::Conv1d conv(
          parent.register_module(name(), torch::nn::Conv1d(torch::nn::Conv1dOptions(2, 2, 3).padding(1))));
      return
          [conv](at::Tensor x) mutable { return torch::relu(conv(x.view({-1, 2, kWidth / 2}))).reshape({-1, kWidth}); };
    }
    case 3: {
      torch::nn::GRU gru(parent.register_module(name(), torch::nn::GRU(torch::nn::GRUOptions(kWidth, kWidth))));
      return [gru](at::Tensor x) mutable { return std::get<0>(gru(x.unsqueeze(1))).squeeze(1); };
    }
    case 4: {
      torch::nn::MultiheadAttention attention(parent.register_module(name(), torch::nn::MultiheadAttention(kWidth, 2)));
      return [attention](at::Tensor x) mutable {
        x = x.unsqueeze(1);
        return std::get<0>(attention(x, x, x)).squeeze(1);
      };
    }
    case 5:
      return draw_plain_parameter(parent);
    case 6:
      if (!linears_.empty()) {
        auto tied = linears_[pick(static_cast<int64_t>(linears_.size()))];
        if (pick(2) == 0) {  // registered in a second place
          parent.register_module(name(), tied);
          return [tied](at::Tensor x) mutable { return torch::tanh(tied(x)); };
        }
        // ties only the weight of another module, with a new bias
        auto bias = parent.register_parameter(name(), torch::zeros({kWidth}));
        parent.register_parameter(name(), tied->weight);
        return [tied, bias](at::Tensor x) { return torch::tanh(torch::matmul(x, tied->weight) + bias); };
      }
      [[fallthrough]];
    default: {
      torch::nn::Linear linear(parent.register_module(
          name(), torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(pick(2) == 0))));
      if (pick(5) == 0)
        for (auto& parameter : linear->parameters()) parameter.requires_grad_(false);
      linears_.push_back(linear);
      return [linear](at::Tensor x) mutable { return torch::tanh(linear(x)); };
    }
  }
}

int trees_to_test(int usually) {
  const char* text = std::getenv("TESSERA_TEST_TREES");
  return text != nullptr ? std::stoi(text) : usually;
}

}  // namespace tessera::testing_support
