#pragma once

#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include <tessera/detail/listed.h>
#include <tessera/detail/parameter_parts.h>

namespace tessera::internal {

// Throws std::invalid_argument unless the parameter, which must have a gradient, is dense and of floating-point type,
// and its gradient is dense.
void require_dense(const at::Tensor& parameter, const char* optimizer);

// Whether an optimizer is elementwise, and so may be given shards, or needs whole parameters.
enum class Sees { kElements, kParameters };

// Base of Tessera's own optimizers: construction, checks and archives. `Options` (see listed.h) must have a kName, and
// a check() that throws std::invalid_argument for invalid values.
template <class Options, class State, Sees sees>
class ListedOptimizer : public torch::optim::Optimizer {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;  // parameters with their own options

  // For whole parameters, like torch's optimizers, or for shards if the optimizer is elementwise. Throws
  // std::invalid_argument for invalid options, for options of another optimizer, and for shards if the optimizer is not
  // elementwise.
  explicit ListedOptimizer(Groups groups, Options defaults = Options())
      : Optimizer(groups, std::make_unique<Options>(defaults)) {
    restore_options(param_groups_, 0, groups);
    check();
  }
  explicit ListedOptimizer(std::vector<at::Tensor> parameters, Options defaults = Options())
      : ListedOptimizer(one_group(std::move(parameters)), std::move(defaults)) {}

  // For a wrapper's parameters, in any groups, which must be equal and in the same order on all ranks. Construction and
  // step() are collective over model.comm(). Throws as above, for tensors that are not in model.named_shards(), and if
  // groups or options differ between ranks. Learning rates set later are not compared.
  ListedOptimizer(const ModelShards& model, Groups groups, Options defaults = Options())
    requires(sees == Sees::kParameters)
      : Optimizer(groups, std::make_unique<Options>(defaults)), parts_(model) {
    restore_options(param_groups_, 0, groups);
    check();
  }
  explicit ListedOptimizer(const ModelShards& model, Options defaults = Options())
    requires(sees == Sees::kParameters)
      : ListedOptimizer(model, one_group(model.parameters()), std::move(defaults)) {}

  // Adds a group, with the checks of construction and nothing changed if they throw. Is collective if constructed with
  // a wrapper. step() checks groups that were added through the base class.
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
  // Returns the parameter's state; creates a missing one.
  State& state_of(const at::Tensor& parameter) {
    auto& slot = state()[parameter.unsafeGetTensorImpl()];
    if (!slot) slot = std::make_unique<State>();
    return static_cast<State&>(*slot);
  }
  const ParameterParts& parts() const { return parts_; }
  // Throws std::invalid_argument, before any change, if require_dense() refuses a parameter with a gradient, or if an
  // added group is invalid.
  void require_steppable() {
    if (checked_groups_ != param_groups().size()) check();
    for (const auto& group : param_groups())
      for (const at::Tensor& parameter : group.params())
        if (parameter.grad().defined()) require_dense(parameter, Options::kName);
  }
  // The parameters of all groups, with or without gradients, and the options of each.
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
  // Collective checks first: if this rank's options are invalid, the other ranks must not wait for it.
  void check() {
    if constexpr (sees == Sees::kParameters) parts_.require_known(param_groups(), Options::kName);
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
