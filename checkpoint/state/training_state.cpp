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
  explicit ScalerState(ShardedGradScaler& scaler) : scaler_(scaler) {}
  std::string state_name() const override { return "grad_scaler"; }
  StateValues state_values() const override {
    const auto state = scaler_.state();
    return {{"scale", state.scale}, {"finite_steps", state.finite_steps}};
  }
  void check_state_values(const StateValues& values) const override {
    require_same_form(values, state_values(), "a gradient scaler");
    if (!(std::get<double>(values.at("scale")) > 0))
      throw std::invalid_argument("the state of a gradient scaler has a scale that is not above 0");
  }
  void load_state_values(const StateValues& values) override {
    scaler_.load_state({std::get<double>(values.at("scale")), std::get<int64_t>(values.at("finite_steps"))});
  }

 private:
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
  // libtorch exposes the count to derived classes only.
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
    // The swapped-out values return when the swap ends.
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

}  // namespace

StateRef::StateRef(ModelShards& model) {
  if (auto* ema = dynamic_cast<Ema*>(&model))
    stateful_ = std::make_shared<EmaState>("ema", *ema);
  else if (auto* with_model = Ema::of(model))
    model_ = &with_model->model(), stateful_ = std::make_shared<EmaState>("ema", *with_model);
  else
    model_ = &model;
}
StateRef::StateRef(const std::string& name, Ema& ema) : stateful_(std::make_shared<EmaState>(name, ema)) {}
StateRef::StateRef(Stateful& stateful) : stateful_(std::shared_ptr<Stateful>(), &stateful) {}
StateRef::StateRef(ShardedGradScaler& scaler) : stateful_(std::make_shared<ScalerState>(scaler)) {}
StateRef::StateRef(torch::optim::LRScheduler& scheduler) : StateRef("scheduler", scheduler) {}
StateRef::StateRef(const std::string& name, torch::optim::LRScheduler& scheduler)
    : stateful_(std::make_shared<SchedulerState>(name, scheduler)) {}

TrainingState::TrainingState(std::initializer_list<StateRef> all) {
  constexpr const char* kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_";
  std::set<std::string> names;
  for (const StateRef& ref : all) {
    if (ref.model_ != nullptr && std::exchange(model_, ref.model_) != nullptr)
      throw std::invalid_argument("a training state has two models; one checkpoint is of one");
    if (ref.optimizer_ != nullptr && std::exchange(optimizer_, ref.optimizer_) != nullptr)
      throw std::invalid_argument("a training state has two optimizers; one checkpoint is of one");
    if (!ref.stateful_) continue;
    const std::string name = ref.stateful_->state_name();
    if (name.empty() || name.find_first_not_of(kPlain) != std::string::npos)
      throw std::invalid_argument("'" + name + "' is not a name of a state: letters, digits and '_' are expected");
    if (!names.insert(name).second) throw std::invalid_argument("two states are named '" + name + "'");
    beside_.push_back(ref.stateful_);
  }
  if (model_ == nullptr) throw std::invalid_argument("a training state has no model");
}

}  // namespace tessera
