#pragma once

#include "gpt.h"
#include "trainable.h"

namespace train_gpt {

// One process that holds everything: the ordinary training loop.
class LocalModel : public Trainable {
 public:
  explicit LocalModel(Gpt model);

  at::Tensor forward(const at::Tensor& tokens) override;
  at::Tensor add_gradients(const Batch& batch, double scale, bool last_of_step) override;
  torch::OrderedDict<std::string, at::Tensor> named_parameters() const override;
  double clip_grad_norm(double max_norm) override;
  void zero_grad() override;
  MemoryUse memory() const override;
  std::string describe() const override;

 protected:
  std::vector<at::Tensor> parameters() const { return model_->parameters(); }

 private:
  Gpt model_;
};

}  // namespace train_gpt
