#include "optimizer.h"

#include <utility>

#include <tessera/model/model_shards.h>
#include "optim/state/optimizer_state.h"

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

template <>
torch::optim::AdamWOptions options_from(const Hyperparameters& hyper) {
  return torch::optim::AdamWOptions(hyper.lr).betas({kBeta1, kBeta2}).weight_decay(hyper.weight_decay);
}
template <>
torch::optim::SGDOptions options_from(const Hyperparameters& hyper) {
  return torch::optim::SGDOptions(hyper.lr).momentum(kBeta1).weight_decay(hyper.weight_decay);
}
template <>
tessera::LionOptions options_from(const Hyperparameters& hyper) {
  return tessera::LionOptions(hyper.lr).weight_decay(hyper.weight_decay);
}
template <>
tessera::AdafactorOptions options_from(const Hyperparameters& hyper) {
  return tessera::AdafactorOptions(hyper.lr).weight_decay(hyper.weight_decay);
}
// Steps are of AdamW's size, so that --lr is the same for all parameters.
template <>
tessera::MuonOptions options_from(const Hyperparameters& hyper) {
  return tessera::MuonOptions(hyper.lr).weight_decay(hyper.weight_decay).match_rms_adamw(true).bfloat16(false);
}
template <>
tessera::AdamW8bitOptions options_from(const Hyperparameters& hyper) {
  return tessera::AdamW8bitOptions(hyper.lr).beta1(kBeta1).beta2(kBeta2).weight_decay(hyper.weight_decay);
}
template <>
tessera::ScheduleFreeOptions options_from(const Hyperparameters& hyper) {
  return tessera::ScheduleFreeOptions(hyper.lr)
      .beta1(kBeta1)
      .beta2(kBeta2)
      .weight_decay(hyper.weight_decay)
      .warmup_steps(hyper.warmup);
}

Groups groups_of(const Parameters& parameters, const std::set<std::string>& matrices,
                 const tessera::MuonOptions& options) {
  std::vector<at::Tensor> hidden, others, plain;
  for (const auto& item : parameters) {
    if (!item.value().requires_grad()) continue;
    if (!matrices.contains(item.key())) {
      plain.push_back(item.value());
    } else {
      (item.key().starts_with("blocks.") ? hidden : others).push_back(item.value());
    }
  }
  const auto adamw = tessera::MuonOptions(options).use_muon(false);
  Groups groups;
  groups.emplace_back(std::move(hidden), std::make_unique<tessera::MuonOptions>(options));
  groups.emplace_back(std::move(others), std::make_unique<tessera::MuonOptions>(adamw));
  groups.emplace_back(std::move(plain),
                      std::make_unique<tessera::MuonOptions>(tessera::MuonOptions(adamw).weight_decay(0.0)));
  return groups;
}

std::vector<double> weight_decays(torch::optim::Optimizer& optimizer) {
  std::vector<double> decays;
  for (const auto& group : optimizer.param_groups())
    for (const auto& [name, value] : tessera::internal::read_options(group.options()))
      if (name == "weight_decay") decays.push_back(std::get<double>(value));
  return decays;
}

void set_weight_decays(torch::optim::Optimizer& optimizer, const std::vector<double>& decays) {
  for (size_t i = 0; i < decays.size(); ++i)
    tessera::internal::write_options(optimizer.param_groups().at(i).options(), {{"weight_decay", decays[i]}});
}

void set_learning_rate(torch::optim::Optimizer& optimizer, double lr) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
}

int64_t state_bytes(torch::optim::Optimizer& optimizer) {
  int64_t bytes = 0;
  for (const auto& [parameter, state] : optimizer.state())
    for (const auto& [name, tensor] : tessera::internal::read_state(*state).tensors)
      bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

}  // namespace train_gpt
