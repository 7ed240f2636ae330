#pragma once

#include <torch/torch.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

namespace tessera::testing_support {

// A random module tree, with input and output [batch, kWidth]. Contains some of the parts of users' models:
// chains, residual branches, modules called or registered twice, tied and frozen weights, plain parameters (of 0, 1 or
// an odd number of elements, without dimensions, non-contiguous), unused parameters, norms with buffers, convolutions,
// recurrent layers and attention. Equal seeds give equal trees and values.
constexpr int64_t kWidth = 8;

struct RandomNetImpl : torch::nn::Module {
  explicit RandomNetImpl(unsigned seed);
  at::Tensor forward(at::Tensor x);

 private:
  using Step = std::function<at::Tensor(at::Tensor)>;
  Step draw(torch::nn::Module& parent, int depth);
  Step draw_leaf(torch::nn::Module& parent);
  Step draw_plain_parameter(torch::nn::Module& parent);
  Step draw_branch(torch::nn::Module& parent, int depth);
  std::string name() { return std::string("m").append(std::to_string(count_++)); }
  int64_t pick(int64_t choices) { return static_cast<int64_t>(random_() % choices); }

  std::mt19937 random_;
  int count_ = 0;
  std::vector<torch::nn::Linear> linears_;
  Step step_;
};
TORCH_MODULE(RandomNet);

// Returns the number of trees to test a property on: TESSERA_TEST_TREES, or `usually`.
int trees_to_test(int usually);

}  // namespace tessera::testing_support
