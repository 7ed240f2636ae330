#include "optimizer.h"

#include <utility>
#include <vector>

namespace train_gpt {
namespace {

constexpr double kBeta1 = 0.9, kBeta2 = 0.95;  // as GPT-3

int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
}

}  // namespace

std::set<std::string> matrix_names(const torch::nn::Module& module) {
  std::set<std::string> names;
  for (const auto& item : module.named_parameters()) {
    if (item.value().dim() >= 2) names.insert(item.key());
  }
  return names;
}

std::unique_ptr<torch::optim::AdamW> make_adamw(const torch::OrderedDict<std::string, at::Tensor>& parameters,
                                                const std::set<std::string>& matrices, double lr,
                                                double weight_decay) {
  std::vector<at::Tensor> decayed, plain;
  for (const auto& item : parameters)
    (matrices.contains(item.key()) ? decayed : plain).push_back(item.value());
  const auto options = [&](double decay) {
    return std::make_unique<torch::optim::AdamWOptions>(
        torch::optim::AdamWOptions(lr).betas({kBeta1, kBeta2}).weight_decay(decay));
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::move(decayed), options(weight_decay));
  groups.emplace_back(std::move(plain), options(0.0));
  return std::make_unique<torch::optim::AdamW>(std::move(groups));
}

void set_learning_rate(torch::optim::AdamW& optimizer, double lr) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
}

int64_t state_bytes(const torch::optim::AdamW& optimizer) {
  int64_t bytes = 0;
  for (const auto& [parameter, state] : optimizer.state()) {
    const auto& moments = static_cast<const torch::optim::AdamWParamState&>(*state);
    bytes += bytes_of(moments.exp_avg()) + bytes_of(moments.exp_avg_sq());
  }
  return bytes;
}

}  // namespace train_gpt
