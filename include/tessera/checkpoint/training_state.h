#pragma once

#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include <tessera/checkpoint/stateful.h>
#include <tessera/model/model_shards.h>
#include <tessera/optim/ema.h>
#include <tessera/optim/sharded_grad_scaler.h>

namespace tessera {

// A reference to one object whose state is saved. The object must outlive it.
class StateRef {
 public:
  // NOLINTBEGIN(google-explicit-constructor): for lists such as {model, optimizer, scaler}
  StateRef(ModelShards& model);  // An Ema is saved as averages named "ema", not as a model.
  StateRef(torch::optim::Optimizer& optimizer) : optimizer_(&optimizer) {}
  StateRef(Stateful& stateful);
  StateRef(ShardedGradScaler& scaler);  // named "grad_scaler"
  // Named "scheduler": its count of steps; learning rates belong to the optimizer.
  StateRef(torch::optim::LRScheduler& scheduler);
  // NOLINTEND(google-explicit-constructor)
  // For several schedulers or averages, each with its own name.
  StateRef(const std::string& name, torch::optim::LRScheduler& scheduler);
  StateRef(const std::string& name, Ema& ema);

 private:
  friend class TrainingState;
  ModelShards* model_ = nullptr;
  torch::optim::Optimizer* optimizer_ = nullptr;
  std::shared_ptr<Stateful> stateful_;
};

// The objects of one training state: one model, at most one optimizer, and Stateful objects.
class TrainingState {
 public:
  // Throws std::invalid_argument for no model, two models, two optimizers, and names that are invalid or duplicate.
  TrainingState(std::initializer_list<StateRef> all);

  ModelShards& model() const { return *model_; }                                    // the only one
  torch::optim::Optimizer* optimizer() const { return optimizer_; }                 // may be null
  const std::vector<std::shared_ptr<Stateful>>& beside() const { return beside_; }  // in the order given

 private:
  ModelShards* model_ = nullptr;
  torch::optim::Optimizer* optimizer_ = nullptr;
  std::vector<std::shared_ptr<Stateful>> beside_;
};

}  // namespace tessera
