#pragma once

#include <vector>

#include "gpt.h"
#include "trainable.h"

namespace train_gpt {

// One process that holds everything: the ordinary training loop.
class LocalModel final : public Trainable {
 public:
  LocalModel(Gpt model, const torch::optim::AdamWOptions& options);

  at::Tensor forward(const at::Tensor& tokens) override;
  at::Tensor add_gradients(const Batch& batch, double scale, bool last_of_step) override;
  double clip_grad_norm(double max_norm) override;
  void step() override;
  void zero_grad() override;
  torch::optim::Optimizer& optimizer() override { return optimizer_; }
  MemoryUse memory() const override;
  std::string describe() const override;

 private:
  Gpt model_;
  mutable torch::optim::AdamW optimizer_;
};

}  // namespace train_gpt
