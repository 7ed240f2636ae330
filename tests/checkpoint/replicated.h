#pragma once

#include <torch/torch.h>

#include <memory>
#include <set>
#include <utility>
#include <vector>

#include <tessera/tessera.h>
#include "core/layout/unit_plan.h"
#include "tests/support/reference.h"

namespace tessera::testing_support {
using namespace internal;

// A minimal ModelShards: every rank holds the whole module (as under DDP), or groups of ranks hold equal parts of
// `group_numel` elements (as under hybrid sharding). Moves the module to the rank's device.
class Replicated : public ModelShards {
 public:
  Replicated(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<Communicator> comm)
      : module_(on_rank_device(std::move(module))), comm_(std::move(comm)) {}

  const std::shared_ptr<Communicator>& comm() const override { return comm_; }
  std::vector<NamedShard> named_shards() const override {
    std::vector<NamedShard> shards;
    for (const auto& unit : plan_units(*module_, {}))
      for (const auto& parameter : unit.parameters)
        shards.push_back({parameter.fqn,
                          parameter.aliases,
                          parameter.tensor.sizes().vec(),
                          strides_of(parameter.tensor),
                          {0, parameter.tensor.numel()},
                          parameter.tensor,
                          comm_->rank(),
                          comm_->size()});
    return shards;
  }
  torch::OrderedDict<std::string, at::Tensor> named_buffers() const override { return module_->named_buffers(); }

  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> parameters;
    for (const auto& shard : named_shards()) parameters.push_back(shard.tensor);
    return parameters;
  }

 private:
  static std::vector<int64_t> strides_of(const at::Tensor& tensor) {
    if (tensor.is_non_overlapping_and_dense()) return tensor.strides().vec();
    return at::empty(tensor.sizes()).strides().vec();
  }
  std::shared_ptr<torch::nn::Module> module_;
  std::shared_ptr<Communicator> comm_;
};

// Even halves of every parameter, each held by every second rank: 1-D, in memory order.
class Hybrid : public ModelShards {
 public:
  Hybrid(const Replicated& whole, int parts) : comm_(whole.comm()), buffers_(whole.named_buffers()) {
    for (NamedShard shard : whole.named_shards()) {
      const int part = comm_->rank() % parts;
      const int64_t numel = shard.tensor.numel();
      shard.held = {numel * part / parts, numel * (part + 1) / parts};
      if (shard.held.numel() == 0) shard.held = {0, 0};
      at::Tensor dense = at::empty_strided(shard.sizes, shard.strides, shard.tensor.options().requires_grad(false));
      dense.copy_(shard.tensor.detach());
      at::Tensor flat = numel == 0 ? dense.reshape({0}) : dense.as_strided({numel}, {1});
      shard.tensor = flat.narrow(0, shard.held.begin, shard.held.numel()).clone().requires_grad_();
      shard.replica = comm_->rank() / parts;
      shard.replica_count = comm_->size() / parts;
      shards_.push_back(shard);
    }
  }
  const std::shared_ptr<Communicator>& comm() const override { return comm_; }
  std::vector<NamedShard> named_shards() const override { return shards_; }
  torch::OrderedDict<std::string, at::Tensor> named_buffers() const override { return buffers_; }
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> parameters;
    for (const auto& shard : shards_) parameters.push_back(shard.tensor);
    return parameters;
  }

 private:
  std::shared_ptr<Communicator> comm_;
  torch::OrderedDict<std::string, at::Tensor> buffers_;
  std::vector<NamedShard> shards_;
};

// An optimizer over whole parameters that ranks own round-robin, like OSS.
class OwnerAdam : public torch::optim::Optimizer, public OptimizerShards {
 public:
  OwnerAdam(const std::vector<at::Tensor>& parameters, int rank, int world, torch::optim::AdamOptions options)
      : Optimizer({torch::optim::OptimizerParamGroup(parameters)},
                  std::make_unique<torch::optim::AdamOptions>(options)) {
    std::vector<at::Tensor> own;
    for (size_t i = 0; i < parameters.size(); ++i)
      if (static_cast<int>(i) % world == rank) own.push_back(parameters[i]);
    for (const auto& tensor : own) owned_.insert(tensor.unsafeGetTensorImpl());
    local_ = std::make_unique<torch::optim::Adam>(own, options);
  }
  at::Tensor step(LossClosure closure = nullptr) override {
    state_.swap(local_->state());
    at::Tensor loss = local_->step(std::move(closure));
    state_.swap(local_->state());
    return loss;
  }
  const torch::optim::Optimizer& local() const override { return *local_; }
  bool owns(const at::Tensor& parameter) const override { return owned_.count(parameter.unsafeGetTensorImpl()) > 0; }

 private:
  std::set<const void*> owned_;
  std::unique_ptr<torch::optim::Adam> local_;
};

}  // namespace tessera::testing_support
