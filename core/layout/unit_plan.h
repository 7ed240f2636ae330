#pragma once

#include <torch/nn/module.h>

#include <string>
#include <unordered_set>
#include <vector>

#include <tessera/wrap.h>

namespace tessera::internal {

// Returns "blocks.3.weight" for module "blocks.3" and name "weight". The root is "".
std::string join_names(const std::string& module, const std::string& name);

// A parameter of the model, under its first registered name.
struct PlannedParameter {
  std::string fqn;
  std::vector<std::string> aliases;  // further names of the same tensor (tied weights)
  at::Tensor tensor;                 // the registered tensor itself (same TensorImpl)
  bool full_precision = false;       // true: never cast
  at::Tensor values = {};            // computed values of a deferred parameter
};

// Parameters that are unsharded, used and resharded together.
struct PlannedUnit {
  static constexpr const char* kRoot = "(root)";

  std::string name;                          // the module's dotted name; kRoot for parameters outside wrapped modules
  std::vector<PlannedParameter> parameters;  // without duplicates, in registration order
  bool is_root() const { return name == kRoot; }
};

// Policies that select modules whose parameters, at any depth, get special treatment. They are called for all modules
// below the root, except inside selected modules. An empty policy selects no module.
struct ParameterPolicies {
  WrapPolicy ignored;         // the plan omits the parameters, under all their names
  WrapPolicy full_precision;  // sets full_precision of parameters whose first name is below the module
};

// Assigns each parameter of `root` to one unit. Parameters are in registration order. Units are in the order of their
// modules; the root's unit comes first. A unit without parameters is omitted. A tied parameter belongs to the unit of
// its first name. A pure function that allocates no tensor.
std::vector<PlannedUnit> plan_units(const torch::nn::Module& root, const WrapPolicy& policy,
                                    const ParameterPolicies& parameters = {});

// Chooses units in the order of the plan. Skips a unit if with it the chosen units would have more than `fraction` of
// the plan's elements. Returns, for each unit, whether it is chosen.
std::vector<bool> first_units(const std::vector<PlannedUnit>& plan, double fraction);

// Returns the modules that the policy selects, and all modules below them.
std::unordered_set<const torch::nn::Module*> modules_below(const torch::nn::Module& root, const WrapPolicy& policy);

}  // namespace tessera::internal
