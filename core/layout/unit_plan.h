#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

namespace tessera {

// "blocks.3.weight": the dotted name of what `module`, of that dotted name, registers as `name`. "" is the root.
std::string join_names(const std::string& module, const std::string& name);

// Names the modules that become units: what is gathered, computed with and released together.
//
// A policy is asked bottom-up, children before parents, about every module but the root, and is told how many elements
// of trainable or frozen parameters below the module no unit has claimed yet. Parameters that no unit claims belong to
// the root's unit. An empty policy makes one unit of the whole model.
using WrapPolicy =
    std::function<bool(const std::string& fqn, const torch::nn::Module& module, int64_t unclaimed_numel)>;

// A unit for each module of one of these types: wrap_modules<BlockImpl>() (FSDP's transformer_auto_wrap_policy). They
// may be bases that modules share.
template <class... Modules>
WrapPolicy wrap_modules() {
  static_assert((... && !torch::detail::is_module_holder<Modules>::value),
                "wrap_modules: that is a holder; a module is an object of the class that ends in Impl");
  return [](const std::string&, const torch::nn::Module& module, int64_t) {
    return (... || (dynamic_cast<const Modules*>(&module) != nullptr));
  };
}

// A unit for each module below which at least min_numel elements are unclaimed (FSDP's size_based_auto_wrap_policy).
// Throws std::invalid_argument if min_numel < 1.
WrapPolicy wrap_by_size(int64_t min_numel);

// A unit for each module for which `predicate` says so; fqn is the module's dotted name.
WrapPolicy wrap_if(std::function<bool(const std::string& fqn, const torch::nn::Module& module)> predicate);

// One parameter of the model, known by the first name it is registered under.
struct PlannedParameter {
  std::string fqn;
  std::vector<std::string> aliases;  // further names of the same tensor (tied weights)
  at::Tensor tensor;                 // the module's own: same TensorImpl
  bool full_precision = false;       // a policy says that it is never cast
  at::Tensor values = {};            // where a deferred parameter's values are; else undefined
};

// What is gathered, computed with and released together.
struct PlannedUnit {
  std::string name;                          // the module's dotted name; "(root)" for what no policy claims
  std::vector<PlannedParameter> parameters;  // each once, in order of registration
};

// Which parameters are treated in another way than the rest: those at or below the modules that a
// policy names (as for units, never the root). An empty policy names none.
struct ParameterPolicies {
  WrapPolicy ignored;         // are no part of the plan, under any name
  WrapPolicy full_precision;  // are marked, if that is where they are met first
};

// The parameters of `root` in units, each parameter once, in order of registration; units in the order of their first
// module, the root's unit first if it has parameters. Units without parameters are left out. A tied parameter goes to
// the unit that meets it first. Pure: allocates no tensor, changes nothing.
std::vector<PlannedUnit> plan_units(const torch::nn::Module& root, const WrapPolicy& policy,
                                    const ParameterPolicies& parameters = {});

// The modules that the policy names, with all modules below them.
std::unordered_set<const torch::nn::Module*> modules_below(const torch::nn::Module& root, const WrapPolicy& policy);

}  // namespace tessera
