#pragma once

#include <memory>
#include <utility>

#include <tessera/ema.h>
#include "trainable.h"

namespace train_gpt {

// A model with the moving average of its weights, which is what is evaluated, and saved beside it.
class WithEma final : public Trainable {
 public:
  WithEma(std::unique_ptr<Trainable> model, double decay)
      : model_(std::move(model)), ema_(model_->shards(), {.decay = decay, .warmup = true}) {}

  at::Tensor forward(const at::Tensor& tokens) override { return model_->forward(tokens); }
  at::Tensor add_gradients(const Batch& batch, double scale, bool last_of_step) override {
    return model_->add_gradients(batch, scale, last_of_step);
  }
  double clip_grad_norm(double max_norm) override { return model_->clip_grad_norm(max_norm); }
  void step() override {
    model_->step();
    ema_.update();
  }
  void zero_grad() override { model_->zero_grad(); }
  std::optional<tessera::Scope> averaged() override { return ema_.swap_in(); }
  torch::optim::Optimizer& optimizer() override { return model_->optimizer(); }
  tessera::ModelShards& shards() override { return ema_.with_model(); }
  tessera::ModelShards& own_shards() override { return model_->shards(); }
  NamedTensors full_state() override { return model_->full_state(); }
  MemoryUse memory() const override { return model_->memory(); }
  std::string describe() const override { return model_->describe() + ", with the average of weights"; }

 private:
  std::unique_ptr<Trainable> model_;
  tessera::Ema ema_;
};

}  // namespace train_gpt
