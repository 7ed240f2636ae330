#pragma once

#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include <tessera/ema.h>
#include <tessera/model_shards.h>
#include <tessera/sharded_grad_scaler.h>
#include <tessera/stateful.h>

namespace tessera {

// One thing whose state is saved, made from the thing, which has to outlive it.
class StateRef {
 public:
  // NOLINTBEGIN(google-explicit-constructor): for lists such as {model, optimizer, scaler}
  StateRef(ModelShards& model);  // an Ema is no model but averages, as "ema"
  StateRef(torch::optim::Optimizer& optimizer) : optimizer_(&optimizer) {}
  StateRef(Stateful& stateful);
  StateRef(ShardedGradScaler& scaler);  // as "grad_scaler"
  StateRef(
      torch::optim::LRScheduler& scheduler);  // as "scheduler": its count of steps; learning rates are the optimizer's
  // NOLINTEND(google-explicit-constructor)
  // Several schedulers, or averages, have names of their own.
  StateRef(const std::string& name, torch::optim::LRScheduler& scheduler);
  StateRef(const std::string& name, Ema& ema);

 private:
  friend class TrainingState;
  ModelShards* model_ = nullptr;
  torch::optim::Optimizer* optimizer_ = nullptr;
  std::shared_ptr<Stateful> stateful_;
};

// All whose state belongs together: one model, at most one optimizer, and what is beside them.
class TrainingState {
 public:
  // Throws std::invalid_argument for no model, two, two optimizers, or names that are not a Stateful's or come twice.
  TrainingState(std::initializer_list<StateRef> all);

  ModelShards& model() const { return *model_; }                                    // the one model
  torch::optim::Optimizer* optimizer() const { return optimizer_; }                 // null: none
  const std::vector<std::shared_ptr<Stateful>>& beside() const { return beside_; }  // in the order given

 private:
  ModelShards* model_ = nullptr;
  torch::optim::Optimizer* optimizer_ = nullptr;
  std::vector<std::shared_ptr<Stateful>> beside_;
};

}  // namespace tessera
