#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <tessera/tessera.h>

namespace train_gpt {

// The names of the parameters with two or more dimensions. To be asked before a wrapper turns
// parameters into flat shards.
std::set<std::string> matrix_names(const torch::nn::Module& module);

// The options of --optimizer: AdamW's with GPT-3's betas, others' as their papers have them.
struct Hyperparameters {
  double lr, weight_decay;
  int64_t warmup;  // steps, of schedule-free AdamW, which has no other schedule
};
template <class Options>
Options options_from(const Hyperparameters& hyper);

using Parameters = torch::OrderedDict<std::string, at::Tensor>;  // by name
using Groups = std::vector<torch::optim::OptimizerParamGroup>;

// Two groups of what is trained, with weight decay for the parameters in `matrices` only: biases, and the scales of
// norms, are not pulled towards 0.
template <class Options>
Groups groups_of(const Parameters& parameters, const std::set<std::string>& matrices, const Options& options) {
  std::vector<at::Tensor> decayed, plain;
  for (const auto& item : parameters) {
    if (item.value().requires_grad()) (matrices.contains(item.key()) ? decayed : plain).push_back(item.value());
  }
  Groups groups;
  groups.emplace_back(std::move(decayed), std::make_unique<Options>(options));
  groups.emplace_back(std::move(plain), std::make_unique<Options>(Options(options).weight_decay(0.0)));
  return groups;
}
// Three: the blocks' matrices are Muon's, embeddings and head AdamW's.
Groups groups_of(const Parameters& parameters, const std::set<std::string>& matrices,
                 const tessera::MuonOptions& options);

// By group.
std::vector<double> weight_decays(torch::optim::Optimizer& optimizer);
void set_weight_decays(torch::optim::Optimizer& optimizer, const std::vector<double>& decays);

void set_learning_rate(torch::optim::Optimizer& optimizer, double lr);

// Bytes of the moments that this rank keeps, which the optimizer makes in its first step.
int64_t state_bytes(torch::optim::Optimizer& optimizer);

}  // namespace train_gpt
