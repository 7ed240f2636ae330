#pragma once

#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include <tessera/detail/listed.h>
#include <tessera/detail/parameter_parts.h>

namespace tessera {

// Throws std::invalid_argument unless the parameter, which has a gradient, is dense and of floating-point type, and
// the gradient dense.
void require_dense(const at::Tensor& parameter, const char* optimizer);

// Whether an optimizer works on each element by itself, so that it may be given shards as they are.
enum class Sees { kElements, kParameters };

// What Tessera's own optimizers have in common: how they are made, checked and archived. `Options` has a kName, and
// check(), which throws std::invalid_argument for values that cannot be meant; both are of listed.h.
template <class Options, class State, Sees sees>
class ListedOptimizer : public torch::optim::Optimizer {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;  // parameters with options of their own

  // Of whole parameters, as torch's optimizers, or of shards where each element is by itself. Throws
  // std::invalid_argument for options that cannot be meant, or of another optimizer, and for shards where parameters
  // are looked at as a whole.
  explicit ListedOptimizer(Groups groups, Options defaults = Options())
      : Optimizer(groups, std::make_unique<Options>(defaults)) {
    check();
  }
  explicit ListedOptimizer(std::vector<at::Tensor> parameters, Options defaults = Options())
      : ListedOptimizer(one_group(std::move(parameters)), std::move(defaults)) {}

  // Of a wrapper's parameters, in any groups, the same in the same order on all ranks. Collective over model.comm(), as
  // step() then is. Throws as above, for tensors that are not among model.named_shards(), and for ranks with other
  // groups or options; learning rates that are set later are not compared.
  ListedOptimizer(const ModelShards& model, Groups groups, Options defaults = Options())
    requires(sees == Sees::kParameters)
      : Optimizer(groups, std::make_unique<Options>(defaults)), parts_(model) {
    check();
  }
  explicit ListedOptimizer(const ModelShards& model, Options defaults = Options())
    requires(sees == Sees::kParameters)
      : ListedOptimizer(model, one_group(model.parameters()), std::move(defaults)) {}

  // As torch's, with what construction demands of groups, before anything is changed: it throws alike, and is
  // collective where a wrapper is given. Groups that come through the base class are looked at by the next step().
  void add_param_group(const torch::optim::OptimizerParamGroup& group) {
    add_checked_group(*this, group, [this] { check(); });
  }

  // Of this rank's state: torch::save.
  void save(torch::serialize::OutputArchive& archive) const override {
    torch::optim::serialize<State, Options>(archive, *this);
  }
  // Of this rank's state: torch::load.
  void load(torch::serialize::InputArchive& archive) override {
    torch::optim::serialize<State, Options>(archive, *this);
  }

 protected:
  static const Options& options_of(const torch::optim::OptimizerParamGroup& group) {
    return static_cast<const Options&>(group.options());
  }
  // The parameter's state, a new one if there is none.
  State& state_of(const at::Tensor& parameter) {
    auto& slot = state()[parameter.unsafeGetTensorImpl()];
    if (!slot) slot = std::make_unique<State>();
    return static_cast<State&>(*slot);
  }
  const ParameterParts& parts() const { return parts_; }
  // Throws std::invalid_argument for a parameter with a gradient that require_dense() refuses, and for groups that have
  // come and cannot be meant; before anything is changed.
  void require_steppable() {
    if (checked_groups_ != param_groups().size()) check();
    for (const auto& group : param_groups())
      for (const at::Tensor& parameter : group.params())
        if (parameter.grad().defined()) require_dense(parameter, Options::kName);
  }
  // The parameters of all groups, with a gradient or not, and the options of each.
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
  // What ranks agree on comes first: one whose options are wrong leaves the others no exchange to wait in.
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

}  // namespace tessera
