#include "optimizer.h"

#include <memory>
#include <utility>

#include "tessera/flat/model_shards.h"
#include "tessera/optim/optimizer_state.h"

namespace train_gpt {
namespace {

constexpr double kBeta1 = 0.9, kBeta2 = 0.95;  // as GPT-3

}  // namespace

std::set<std::string> matrix_names(const torch::nn::Module& module) {
  std::set<std::string> names;
  for (const auto& item : module.named_parameters()) {
    if (item.value().dim() >= 2) names.insert(item.key());
  }
  return names;
}

torch::optim::AdamWOptions adamw_options(double lr, double weight_decay) {
  return torch::optim::AdamWOptions(lr).betas({kBeta1, kBeta2}).weight_decay(weight_decay);
}

std::vector<torch::optim::OptimizerParamGroup> adamw_groups(
    const torch::OrderedDict<std::string, at::Tensor>& parameters, const std::set<std::string>& matrices,
    const torch::optim::AdamWOptions& options) {
  std::vector<at::Tensor> decayed, plain;
  for (const auto& item : parameters) (matrices.contains(item.key()) ? decayed : plain).push_back(item.value());
  auto without_decay = std::make_unique<torch::optim::AdamWOptions>(options);
  without_decay->weight_decay(0.0);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::move(decayed), std::make_unique<torch::optim::AdamWOptions>(options));
  groups.emplace_back(std::move(plain), std::move(without_decay));
  return groups;
}

void set_learning_rate(torch::optim::Optimizer& optimizer, double lr) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
}

int64_t state_bytes(torch::optim::Optimizer& optimizer) {
  auto* sharded = dynamic_cast<tessera::OptimizerShards*>(&optimizer);
  int64_t bytes = 0;
  for (const auto& [parameter, state] : (sharded != nullptr ? sharded->local() : optimizer).state())
    for (const auto& [name, tensor] : tessera::read_state(*state).tensors)
      bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

}  // namespace train_gpt
