#include "local.h"

#include <utility>

#include "optimizer.h"

namespace train_gpt {

std::vector<tessera::NamedShard> WholeModel::named_shards() const {
  std::vector<tessera::NamedShard> shards;
  for (const auto& item : model_->named_parameters())
    shards.push_back({.fqn = item.key(),
                      .aliases = {},
                      .sizes = item.value().sizes().vec(),
                      .strides = item.value().strides().vec(),
                      .held = {0, item.value().numel()},
                      .tensor = item.value()});
  return shards;
}

LocalModel::LocalModel(Gpt model, const MakeOptimizer& make, std::shared_ptr<tessera::Communicator> comm)
    : model_(std::move(model)), shards_(model_, std::move(comm)), optimizer_(make(*model_)) {}

at::Tensor LocalModel::forward(const at::Tensor& tokens) { return model_->forward(tokens); }

at::Tensor LocalModel::add_gradients(const Batch& batch, double scale, bool /*last_of_step*/) {
  const auto loss = language_model_loss(model_->forward(batch.inputs), batch.targets);
  (loss * scale).backward();
  return loss.detach();
}

double LocalModel::clip_grad_norm(double max_norm) {
  return torch::nn::utils::clip_grad_norm_(model_->parameters(), max_norm);
}

void LocalModel::step() { optimizer_->step(); }

void LocalModel::zero_grad() { model_->zero_grad(); }

MemoryUse LocalModel::memory() const {
  MemoryUse memory;
  for (const auto& parameter : model_->parameters()) {
    memory.parameter_bytes += static_cast<int64_t>(parameter.nbytes());
    if (parameter.grad().defined()) memory.grad_bytes += static_cast<int64_t>(parameter.grad().nbytes());
  }
  memory.optimizer_bytes = state_bytes(*optimizer_);
  return memory;
}

std::optional<tessera::ScopeExit> LocalModel::averaged() {
  auto* averages = dynamic_cast<tessera::Averages*>(optimizer_.get());
  return averages != nullptr ? std::optional<tessera::ScopeExit>(averages->swap_in_averages()) : std::nullopt;
}

std::string LocalModel::describe() const { return "one process, nothing sharded"; }

}  // namespace train_gpt
