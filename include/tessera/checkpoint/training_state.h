#pragma once

#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <tessera/checkpoint/stateful.h>
#include <tessera/model/model_shards.h>
#include <tessera/optim/ema.h>
#include <tessera/optim/sharded_grad_scaler.h>

namespace tessera {

// The objects of one training state: models, optimizers and Stateful objects. If there are several models, each of them
// needs a name. The same holds for optimizers. An optimizer may have parameters of several models:
//
//   {{"generator", g}, {"critic", c}, {"of_generator", g_adam}, {"of_critic", c_adam}, scaler}
//   {model, {"muon", muon}, {"adamw", adamw}}
class TrainingState {
 public:
  // A reference to one object whose state is saved. The object must outlive the TrainingState.
  class StateRef {
   public:
    // NOLINTBEGIN(google-explicit-constructor): for lists such as {model, optimizer, scaler}
    StateRef(ModelShards& model);  // an Ema is saved as averages "ema", not as a model
    StateRef(torch::optim::Optimizer& optimizer) : optimizer_(&optimizer) {}
    StateRef(Stateful& stateful);
    StateRef(ShardedGradScaler& scaler);  // named "grad_scaler"
    // Named "scheduler". The state is the count of steps; learning rates belong to the optimizer.
    StateRef(torch::optim::LRScheduler& scheduler);
    // NOLINTEND(google-explicit-constructor)
    // For several objects of one kind, each with its own name. In the checkpoint, tensors of a named model are
    // "<name>.<fqn>". The averages of a named Ema::with_model() are "<name>_ema".
    StateRef(const std::string& name, ModelShards& model);
    StateRef(const std::string& name, torch::optim::Optimizer& optimizer);
    StateRef(const std::string& name, torch::optim::LRScheduler& scheduler);
    StateRef(const std::string& name, ShardedGradScaler& scaler);
    StateRef(const std::string& name, Ema& ema);

   private:
    friend class TrainingState;
    std::string name_;  // name of a model or optimizer; "" for a single one
    ModelShards* model_ = nullptr;
    torch::optim::Optimizer* optimizer_ = nullptr;
    std::shared_ptr<Stateful> stateful_;
  };

  // Throws std::invalid_argument if there is no model, or if models have different communicators. Also throws it if
  // names are invalid or duplicate, or if one of several models or optimizers has no name.
  TrainingState(std::initializer_list<StateRef> all);

  ModelShards& model() const { return *model_; }  // the only model, or all named models as one
  const std::vector<std::string>& model_names() const { return model_names_; }  // empty for a single unnamed model
  // Returns the optimizers by name. A single optimizer may have the name "".
  const std::map<std::string, torch::optim::Optimizer*>& optimizers() const { return optimizers_; }
  const std::vector<std::shared_ptr<Stateful>>& beside() const { return beside_; }  // Stateful objects, in given order

 private:
  std::shared_ptr<ModelShards> model_;
  std::vector<std::string> model_names_;
  std::map<std::string, torch::optim::Optimizer*> optimizers_;
  std::vector<std::shared_ptr<Stateful>> beside_;
};

}  // namespace tessera
