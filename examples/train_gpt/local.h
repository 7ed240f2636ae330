#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "gpt.h"
#include "trainable.h"

namespace train_gpt {

// A model that every rank holds whole, as files are read and written by it.
class WholeModel final : public tessera::ModelShards {
 public:
  WholeModel(Gpt model, std::shared_ptr<tessera::Communicator> comm)
      : model_(std::move(model)), comm_(std::move(comm)) {}
  const std::shared_ptr<tessera::Communicator>& comm() const override { return comm_; }
  std::vector<tessera::NamedShard> named_shards() const override;
  torch::OrderedDict<std::string, at::Tensor> named_buffers() const override { return model_->named_buffers(); }

 private:
  Gpt model_;
  std::shared_ptr<tessera::Communicator> comm_;
};

// One process that holds everything: the ordinary training loop.
class LocalModel final : public Trainable {
 public:
  using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(const torch::nn::Module&)>;
  LocalModel(Gpt model, const MakeOptimizer& make, std::shared_ptr<tessera::Communicator> comm);

  at::Tensor forward(const at::Tensor& tokens) override;
  at::Tensor add_gradients(const Batch& batch, double scale, bool last_of_step) override;
  double clip_grad_norm(double max_norm) override;
  void step() override;
  void zero_grad() override;
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  tessera::ModelShards& shards() override { return shards_; }
  std::optional<tessera::ScopeExit> averaged() override;
  NamedTensors full_state() override { return model_->named_parameters(); }
  MemoryUse memory() const override;
  std::string describe() const override;

 private:
  Gpt model_;
  WholeModel shards_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

}  // namespace train_gpt
