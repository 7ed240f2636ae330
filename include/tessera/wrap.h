#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <string>

namespace tessera {

// Selects the modules that become units. The parameters of a unit are unsharded and resharded together.
//
// A policy returns whether a module becomes a unit. It is called for every module except the root, children before
// parents. `unclaimed_numel` counts the module's parameter elements, trainable or frozen, that belong to no unit yet.
// Elements that no other unit claims belong to the root's unit. With an empty policy, the whole model is one unit.
using WrapPolicy =
    std::function<bool(const std::string& fqn, const torch::nn::Module& module, int64_t unclaimed_numel)>;

// Returns a policy that makes each module of these types a unit: wrap_modules<BlockImpl>(). A type may be a common base
// class of several modules. Like FSDP's transformer_auto_wrap_policy.
template <class... Modules>
WrapPolicy wrap_modules() {
  static_assert((... && !torch::detail::is_module_holder<Modules>::value),
                "wrap_modules: that is a holder; a module is an object of the class that ends in Impl");
  return [](const std::string&, const torch::nn::Module& module, int64_t) {
    return (... || (dynamic_cast<const Modules*>(&module) != nullptr));
  };
}

// Returns a policy that makes each module with at least min_numel unclaimed elements a unit (FSDP's
// size_based_auto_wrap_policy). Throws std::invalid_argument if min_numel < 1.
WrapPolicy wrap_by_size(int64_t min_numel);

// Returns a policy that makes each module a unit for which `predicate` returns true. `fqn` is the dotted name. If
// `predicate` is empty, throws std::invalid_argument.
WrapPolicy wrap_if(std::function<bool(const std::string& fqn, const torch::nn::Module& module)> predicate);

}  // namespace tessera
