#include <tessera/checkpoint/training_state.h>

#include <limits>
#include <set>
#include <stdexcept>
#include <utility>

namespace tessera {
using namespace internal;
namespace {

class ScalerState : public Stateful {
 public:
  ScalerState(std::string name, ShardedGradScaler& scaler) : name_(std::move(name)), scaler_(scaler) {}
  std::string state_name() const override { return name_; }
  StateValues state_values() const override {
    const auto state = scaler_.state();
    return {{"scale", state.scale}, {"finite_steps", state.finite_steps}};
  }
  void check_state_values(const StateValues& values) const override {
    require_same_form(values, state_values(), "a gradient scaler");
    ShardedGradScaler copy(scaler_);  // throws if a value is invalid
    copy.load_state({std::get<double>(values.at("scale")), std::get<int64_t>(values.at("finite_steps"))});
  }
  void load_state_values(const StateValues& values) override {
    scaler_.load_state({std::get<double>(values.at("scale")), std::get<int64_t>(values.at("finite_steps"))});
  }

 private:
  const std::string name_;
  ShardedGradScaler& scaler_;
};

class SchedulerState : public Stateful {
 public:
  SchedulerState(std::string name, torch::optim::LRScheduler& scheduler)
      : name_(std::move(name)), scheduler_(scheduler) {}
  std::string state_name() const override { return name_; }
  StateValues state_values() const override { return {{"steps", int64_t{Steps::of(scheduler_)}}}; }
  void check_state_values(const StateValues& values) const override {
    require_same_form(values, state_values(), "a scheduler");
    const int64_t steps = std::get<int64_t>(values.at("steps"));
    if (steps < 0 || steps > std::numeric_limits<unsigned>::max())
      throw std::invalid_argument("the state of a scheduler has " + std::to_string(steps) + " steps");
  }
  void load_state_values(const StateValues& values) override {
    Steps::of(scheduler_) = static_cast<unsigned>(std::get<int64_t>(values.at("steps")));
  }

 private:
  // Provides access to the scheduler's step count, which is a protected member of libtorch's class.
  struct Steps : torch::optim::LRScheduler {
    static unsigned& of(torch::optim::LRScheduler& scheduler) { return scheduler.*(&Steps::step_count_); }
  };
  const std::string name_;
  torch::optim::LRScheduler& scheduler_;
};

class EmaState : public Stateful {
 public:
  EmaState(std::string name, Ema& ema) : name_(std::move(name)), ema_(ema) {}
  std::string state_name() const override { return name_; }
  StateValues state_values() const override {
    if (ema_.is_swapped_in()) throw std::invalid_argument(kSwapped);
    return {{"updates", ema_.updates()}};
  }
  void check_state_values(const StateValues& values) const override {
    // Refuses the load, because the end of the swap would overwrite the loaded values.
    if (ema_.is_swapped_in()) throw std::invalid_argument(kSwapped);
    require_same_form(values, {{"updates", int64_t{0}}}, "averages");
    if (std::get<int64_t>(values.at("updates")) < 0)
      throw std::invalid_argument("the state of averages has fewer than 0 updates");
  }
  void load_state_values(const StateValues& values) override {
    ema_.with_model().named_buffers()["ema.updates"].fill_(std::get<int64_t>(values.at("updates")));
  }
  std::vector<NamedShard> state_shards() const override { return ema_.named_shards(); }

 private:
  static constexpr const char* kSwapped =
      "the model has the averages, of Ema::swap_in(); save and load after the scope";
  const std::string name_;
  Ema& ema_;
};

// Combines several models into one. The name of each tensor begins with the name of its model.
class JoinedModels : public ModelShards {
 public:
  explicit JoinedModels(std::vector<std::pair<std::string, ModelShards*>> models) : models_(std::move(models)) {}

  const std::shared_ptr<Communicator>& comm() const override { return models_[0].second->comm(); }
  std::vector<NamedShard> named_shards() const override { return joined(&ModelShards::named_shards); }
  std::vector<NamedShard> shards_to_save() const override { return joined(&ModelShards::shards_to_save); }
  std::vector<HeldPart> held_by(int rank) const override {
    std::vector<HeldPart> all;
    for (const auto& [name, model] : models_)
      for (const HeldPart& part : model->held_by(rank)) all.push_back(part);
    return all;
  }
  torch::OrderedDict<std::string, at::Tensor> named_buffers() const override {
    torch::OrderedDict<std::string, at::Tensor> all;
    for (const auto& [name, model] : models_)
      for (const auto& buffer : model->named_buffers()) all.insert(name + "." + buffer.key(), buffer.value());
    return all;
  }

 private:
  std::vector<NamedShard> joined(std::vector<NamedShard> (ModelShards::*list)() const) const {
    std::vector<NamedShard> all;
    for (const auto& [name, model] : models_)
      for (NamedShard shard : (model->*list)()) {
        shard.fqn = name + "." + shard.fqn;
        for (std::string& alias : shard.aliases) alias = name + "." + alias;
        all.push_back(std::move(shard));
      }
    return all;
  }

  const std::vector<std::pair<std::string, ModelShards*>> models_;
};

void check_name(const std::string& name) {
  constexpr const char* kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_";
  if (name.empty() || name.find_first_not_of(kPlain) != std::string::npos)
    throw std::invalid_argument("'" + name + "' is not a name of a state: letters, digits and '_' are expected");
}

}  // namespace

TrainingState::StateRef::StateRef(const std::string& name, ModelShards& model) : StateRef(model) {
  check_name(name);
  if (auto* ema = dynamic_cast<Ema*>(&model))
    stateful_ = std::make_shared<EmaState>(name, *ema);
  else if (auto* with_model = Ema::of(model))
    stateful_ = std::make_shared<EmaState>(name + "_ema", *with_model);
  name_ = name;
}
TrainingState::StateRef::StateRef(const std::string& name, torch::optim::Optimizer& optimizer)
    : name_(name), optimizer_(&optimizer) {
  check_name(name);
}
TrainingState::StateRef::StateRef(ModelShards& model) {
  if (auto* ema = dynamic_cast<Ema*>(&model))
    stateful_ = std::make_shared<EmaState>("ema", *ema);
  else if (auto* with_model = Ema::of(model))
    model_ = &with_model->model(), stateful_ = std::make_shared<EmaState>("ema", *with_model);
  else
    model_ = &model;
}
TrainingState::StateRef::StateRef(const std::string& name, Ema& ema)
    : stateful_(std::make_shared<EmaState>(name, ema)) {}
TrainingState::StateRef::StateRef(Stateful& stateful) : stateful_(std::shared_ptr<Stateful>(), &stateful) {}
TrainingState::StateRef::StateRef(ShardedGradScaler& scaler) : StateRef("grad_scaler", scaler) {}
TrainingState::StateRef::StateRef(const std::string& name, ShardedGradScaler& scaler)
    : stateful_(std::make_shared<ScalerState>(name, scaler)) {}
TrainingState::StateRef::StateRef(torch::optim::LRScheduler& scheduler) : StateRef("scheduler", scheduler) {}
TrainingState::StateRef::StateRef(const std::string& name, torch::optim::LRScheduler& scheduler)
    : stateful_(std::make_shared<SchedulerState>(name, scheduler)) {}

TrainingState::TrainingState(std::initializer_list<StateRef> all) {
  std::set<std::string> names;
  std::vector<std::pair<std::string, ModelShards*>> models;
  auto refuse = [](const std::string& reason) { throw std::invalid_argument("a training state has " + reason); };
  for (const StateRef& ref : all) {
    if (ref.model_ != nullptr) models.emplace_back(ref.name_, ref.model_);
    if (ref.optimizer_ != nullptr && !optimizers_.emplace(ref.name_, ref.optimizer_).second)
      refuse(ref.name_.empty() ? "two optimizers without a name: {{\"first\", a}, {\"second\", b}} names them"
                               : "two optimizers named '" + ref.name_ + "'");
    if (!ref.stateful_) continue;
    const std::string name = ref.stateful_->state_name();
    check_name(name);
    if (!names.insert(name).second) throw std::invalid_argument("two states are named '" + name + "'");
    beside_.push_back(ref.stateful_);
  }
  if (models.empty()) refuse("no model");
  if (optimizers_.size() > 1 && optimizers_.contains("")) refuse("several optimizers, of which one has no name");
  if (models.size() == 1 && models[0].first.empty()) {
    model_ = std::shared_ptr<ModelShards>(std::shared_ptr<void>(), models[0].second);
    return;
  }
  std::set<std::string> own;
  for (const auto& [name, model] : models) {
    if (name.empty()) refuse("several models, of which one has no name: {{\"first\", a}, {\"second\", b}} names them");
    if (!own.insert(name).second) refuse("two models named '" + name + "'");
    if (model->comm() != models[0].second->comm())
      refuse("the models '" + models[0].first + "' and '" + name + "' of different communicators, expected one");
    model_names_.push_back(name);
  }
  model_ = std::make_shared<JoinedModels>(std::move(models));
}

}  // namespace tessera
