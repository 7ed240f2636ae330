#pragma once

#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <tessera/detail/parameter_parts.h>

namespace tessera::internal {

// Base classes of options and states of Tessera's optimizers. `Derived` lists its fields once, in a visit() function:
//
//   void visit(auto visit) { visit("lr", lr()), visit("exp_avg", exp_avg()); }
//
// libtorch's archives (in this file) and checkpoints (optimizer_state.h) call visit() to read and write fields. visit()
// passes options as bool or double, and states as int64_t or tensors. Archives omit undefined tensors.

// For check(). Unless `holds`, throws std::invalid_argument: "Muon: momentum is 1, expected 0 or more and below 1".
void require_option(bool holds, const char* optimizer, const char* option, double value, const char* expected);

// Like TORCH_ARG, but for a base class: the setter returns a reference to the derived options.
#define TESSERA_LISTED_OPTION(name)                       \
  Derived& name(double value) {                           \
    name##_ = value;                                      \
    return static_cast<Derived&>(*this);                  \
  }                                                       \
  const double& name() const noexcept { return name##_; } \
  double& name() noexcept { return name##_; }

// Calls visit() for a whole-number option, as a double, which may be rounded. If visit() changes the double, sets the
// number to it, rounded toward zero and clamped to int64_t; otherwise the number stays exact.
template <class Visit>
void visit_whole_number(Visit& visit, const char* name, int64_t& number) {
  constexpr double kEnd = 0x1p63;
  const auto rounded = static_cast<double>(number);
  double value = rounded;
  visit(name, value);
  if (value == rounded) return;
  number = value >= kEnd   ? std::numeric_limits<int64_t>::max()
           : value > -kEnd ? static_cast<int64_t>(value)
                           : std::numeric_limits<int64_t>::min();
}

namespace listed {

// Throws std::invalid_argument if fields are missing or unknown: the archive then belongs to another optimizer.
void require_fields(const std::vector<std::string>& missing, const std::vector<std::string>& unknown);

template <class Listed>
void read(Listed& fields, torch::serialize::InputArchive& archive) {
  std::vector<std::string> unknown = archive.keys(), missing;
  fields.visit([&](const char* name, auto& field) {
    c10::IValue value;
    std::erase(unknown, name);
    if (archive.try_read(name, value))
      field = value.to<std::decay_t<decltype(field)>>();
    else if (!std::is_same_v<std::decay_t<decltype(field)>, at::Tensor>)
      missing.emplace_back(name);
  });
  require_fields(missing, unknown);
}

template <class Listed>
void write(const Listed& fields, torch::serialize::OutputArchive& archive) {
  const_cast<Listed&>(fields).visit([&](const char* name, auto& field) {
    if constexpr (std::is_same_v<std::decay_t<decltype(field)>, at::Tensor>) {
      if (!field.defined()) return;
    }
    archive.write(name, c10::IValue(field));
  });
}

}  // namespace listed

// Base class of options. `Derived` must have a kName and a field lr().
template <class Derived>
class ListedOptions : public torch::optim::OptimizerCloneableOptions<Derived> {
 public:
  // Read and write the fields by name, for torch::load and torch::save. Reading throws as require_fields() does.
  void serialize(torch::serialize::InputArchive& archive) override { listed::read(self(), archive); }
  void serialize(torch::serialize::OutputArchive& archive) const override { listed::write(self(), archive); }
  double get_lr() const override { return self().lr(); }  // returns lr(), for torch's schedulers
  void set_lr(double lr) override { self().lr(lr); }      // sets lr(), for torch's schedulers

 private:
  Derived& self() { return static_cast<Derived&>(*this); }
  const Derived& self() const { return static_cast<const Derived&>(*this); }
};

// Base class of options with weight decay. check() and visit() of `Derived` must first call those of this class.
template <class Derived>
class ListedDecay : public ListedOptions<Derived> {
 public:
  // Sets the defaults.
  ListedDecay(double lr, double weight_decay) : lr_(lr), weight_decay_(weight_decay) {}

  TESSERA_LISTED_OPTION(lr)            // the learning rate
  TESSERA_LISTED_OPTION(weight_decay)  // weight decay; if decoupled, multiplies parameters by 1 - lr * weight_decay

  // Throws std::invalid_argument if a value is out of range.
  void check() const {
    require_option(lr_ >= 0, Derived::kName, "lr", lr_, "0 or more");
    require_option(weight_decay_ >= 0, Derived::kName, "weight_decay", weight_decay_, "0 or more");
  }
  // Calls visit(name, value) for each option.
  void visit(auto visit) {
    visit("lr", lr_);
    visit("weight_decay", weight_decay_);
  }

 private:
  double lr_, weight_decay_;
};

// Base class of options with beta1 and beta2, the decay factors of moving averages.
template <class Derived>
class ListedBetas : public ListedDecay<Derived> {
 public:
  // Sets the defaults.
  ListedBetas(double lr, double beta1, double beta2, double weight_decay)
      : ListedDecay<Derived>(lr, weight_decay), beta1_(beta1), beta2_(beta2) {}

  TESSERA_LISTED_OPTION(beta1)  // decay factor of the first moving average
  TESSERA_LISTED_OPTION(beta2)  // decay factor of the second moving average

  // Throws std::invalid_argument if a value is out of range.
  void check() const {
    ListedDecay<Derived>::check();
    require_option(beta1_ >= 0 && beta1_ < 1, Derived::kName, "beta1", beta1_, "0 or more and below 1");
    require_option(beta2_ >= 0 && beta2_ < 1, Derived::kName, "beta2", beta2_, "0 or more and below 1");
  }
  // Calls visit(name, value) for each option.
  void visit(auto visit) {
    ListedDecay<Derived>::visit(visit);
    visit("beta1", beta1_);
    visit("beta2", beta2_);
  }

 private:
  double beta1_, beta2_;
};

#undef TESSERA_LISTED_OPTION

// Base class of the state of one parameter.
template <class Derived>
class ListedState : public torch::optim::OptimizerCloneableParamState<Derived> {
 public:
  // Read and write the fields by name, for torch::load and torch::save. Reading throws as require_fields() does.
  void serialize(torch::serialize::InputArchive& archive) override {
    listed::read(static_cast<Derived&>(*this), archive);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    listed::write(static_cast<const Derived&>(*this), archive);
  }
};

// Throws std::invalid_argument, naming `optimizer` and the parameter's shape, unless the parameter is dense and of
// floating-point type. A gradient, if the parameter has one, must be dense, too.
void require_dense(const at::Tensor& parameter, const char* optimizer);

// kElements: the optimizer is elementwise and may step shards. kParameters: the optimizer needs whole parameters.
enum class Sees { kElements, kParameters };

// Base class of Tessera's own optimizers: construction, checks and archives. `Options` must be derived from
// ListedOptions, with a kName, and with a check() that throws std::invalid_argument for invalid values.
template <class Options, class State, Sees sees>
class ListedOptimizer : public torch::optim::Optimizer {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;  // parameters, each group with its own options

  // Accepts whole parameters, like torch's optimizers. An elementwise optimizer also accepts shards. Throws
  // std::invalid_argument for invalid options, for options of another optimizer, and for shards if the optimizer is not
  // elementwise. A parameter that a group lists twice (tied weights) is stepped once. Throws std::invalid_argument if a
  // parameter is in two groups.
  explicit ListedOptimizer(Groups groups, Options defaults = Options())
      : Optimizer(groups, std::make_unique<Options>(defaults)) {
    restore_options(param_groups_, 0, groups);
    check();
  }
  explicit ListedOptimizer(std::vector<at::Tensor> parameters, Options defaults = Options())
      : ListedOptimizer(one_group(std::move(parameters)), std::move(defaults)) {}

  // Accepts the parameters of a wrapper. The groups must be equal and in the same order on all ranks. Construction and
  // step() are collective over model.comm(). Throws like the constructors above, except for shards. Also throws
  // std::invalid_argument for tensors that are not in model.named_shards(), and if groups or options differ between
  // ranks. Later learning rates are not compared.
  ListedOptimizer(const ModelShards& model, Groups groups, Options defaults = Options())
    requires(sees == Sees::kParameters)
      : Optimizer(groups, std::make_unique<Options>(defaults)), parts_(model) {
    restore_options(param_groups_, 0, groups);
    check();
  }
  explicit ListedOptimizer(const ModelShards& model, Options defaults = Options())
    requires(sees == Sees::kParameters)
      : ListedOptimizer(model, one_group(model.parameters()), std::move(defaults)) {}

  // Adds a group. Throws the errors that construction with the group would throw, with nothing changed. Collective if
  // constructed with a wrapper. step() checks groups that the base class's add_param_group() has added.
  void add_param_group(const torch::optim::OptimizerParamGroup& group) {
    add_checked_group(*this, group, [this] { check(); });
  }

  // For torch::save: writes this rank's state.
  void save(torch::serialize::OutputArchive& archive) const override {
    torch::optim::serialize<State, Options>(archive, *this);
  }
  // For torch::load: reads this rank's state.
  void load(torch::serialize::InputArchive& archive) override {
    torch::optim::serialize<State, Options>(archive, *this);
  }

 protected:
  static const Options& options_of(const torch::optim::OptimizerParamGroup& group) {
    return static_cast<const Options&>(group.options());
  }
  // Returns the parameter's state. Creates the state if it is missing.
  State& state_of(const at::Tensor& parameter) {
    auto& slot = state()[parameter.unsafeGetTensorImpl()];
    if (!slot) slot = std::make_unique<State>();
    return static_cast<State&>(*slot);
  }
  const ParameterParts& parts() const { return parts_; }
  // Throws std::invalid_argument if require_dense() rejects a parameter that has a gradient. Also throws if the base
  // class's add_param_group() has added an invalid group. Changes no parameter or state.
  void require_steppable() {
    if (checked_groups_ != param_groups().size()) check();
    for (const auto& group : param_groups())
      for (const at::Tensor& parameter : group.params())
        if (parameter.grad().defined()) require_dense(parameter, Options::kName);
  }
  // The parameters of all groups, with or without gradients. options[i] are the options of tensors[i].
  struct Parameters {
    std::vector<at::Tensor> tensors;
    std::vector<const Options*> options;
  };
  Parameters all_parameters() const {
    Parameters all;
    for (const auto& group : param_groups()) {
      all.tensors.insert(all.tensors.end(), group.params().begin(), group.params().end());
      all.options.resize(all.tensors.size(), &options_of(group));
    }
    return all;
  }

 private:
  static Groups one_group(std::vector<at::Tensor> parameters) {
    Groups groups;
    groups.emplace_back(std::move(parameters));
    return groups;
  }
  // Runs the collective check first. If a local check then throws on one rank, no other rank waits for that rank.
  void check() {
    if constexpr (sees == Sees::kParameters) parts_.require_known(param_groups(), Options::kName);
    list_once(param_groups(), Options::kName);
    static_cast<const Options&>(defaults()).check();
    for (const auto& group : param_groups()) {
      const auto* options = dynamic_cast<const Options*>(&group.options());
      if (options == nullptr)
        throw std::invalid_argument(std::string(Options::kName) + ": a group has options of another optimizer");
      options->check();
    }
    checked_groups_ = param_groups().size();
  }

  ParameterParts parts_;
  size_t checked_groups_ = 0;
};

}  // namespace tessera::internal
