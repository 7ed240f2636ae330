#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace train_gpt {

// The names of the parameters with two or more dimensions. To be asked before a wrapper turns
// parameters into flat shards.
std::set<std::string> matrix_names(const torch::nn::Module& module);

// AdamW's options, with GPT-3's betas.
torch::optim::AdamWOptions adamw_options(double lr, double weight_decay);

// Two groups, with weight decay for the parameters in `matrices` only: biases, and the scales of
// norms, are not pulled towards 0.
std::vector<torch::optim::OptimizerParamGroup> adamw_groups(
    const torch::OrderedDict<std::string, at::Tensor>& parameters, const std::set<std::string>& matrices,
    const torch::optim::AdamWOptions& options);

void set_learning_rate(torch::optim::Optimizer& optimizer, double lr);

// Bytes of the moments that this rank keeps, which the optimizer makes in its first step.
int64_t state_bytes(torch::optim::Optimizer& optimizer);

}  // namespace train_gpt
