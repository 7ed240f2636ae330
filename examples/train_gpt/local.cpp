#include "local.h"

#include <utility>

namespace train_gpt {

LocalModel::LocalModel(Gpt model) : model_(std::move(model)) {}

at::Tensor LocalModel::forward(const at::Tensor& tokens) { return model_->forward(tokens); }

at::Tensor LocalModel::add_gradients(const Batch& batch, double scale, bool /*last_of_step*/) {
  const auto loss = language_model_loss(model_->forward(batch.inputs), batch.targets);
  (loss * scale).backward();
  return loss.detach();
}

torch::OrderedDict<std::string, at::Tensor> LocalModel::named_parameters() const {
  return model_->named_parameters();
}

double LocalModel::clip_grad_norm(double max_norm) {
  return torch::nn::utils::clip_grad_norm_(parameters(), max_norm);
}

void LocalModel::zero_grad() { model_->zero_grad(); }

MemoryUse LocalModel::memory() const {
  MemoryUse memory;
  for (const auto& parameter : parameters()) {
    memory.parameter_bytes += static_cast<int64_t>(parameter.nbytes());
    if (parameter.grad().defined()) memory.grad_bytes += static_cast<int64_t>(parameter.grad().nbytes());
  }
  return memory;
}

std::string LocalModel::describe() const { return "one process, nothing sharded"; }

}  // namespace train_gpt
