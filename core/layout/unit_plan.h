#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

#include <tessera/wrap.h>

namespace tessera::internal {

// "blocks.3.weight": the dotted name of what `module`, of that dotted name, registers as `name`. "" is the root.
std::string join_names(const std::string& module, const std::string& name);

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

}  // namespace tessera::internal
