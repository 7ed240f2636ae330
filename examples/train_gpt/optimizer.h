#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>

namespace train_gpt {

// The names of the parameters with two or more dimensions. To be asked before a wrapper turns
// parameters into flat shards.
std::set<std::string> matrix_names(const torch::nn::Module& module);

// AdamW over `parameters`, with weight decay for those in `matrices` only: biases, and the scales
// of norms, are not pulled towards 0.
std::unique_ptr<torch::optim::AdamW> make_adamw(const torch::OrderedDict<std::string, at::Tensor>& parameters,
                                                const std::set<std::string>& matrices, double lr,
                                                double weight_decay);

void set_learning_rate(torch::optim::AdamW& optimizer, double lr);

// Bytes of the moments that the optimizer keeps, which it makes in its first step.
int64_t state_bytes(const torch::optim::AdamW& optimizer);

}  // namespace train_gpt
