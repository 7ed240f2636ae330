#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <string>

namespace tessera {

// Names the modules that become units, which are unsharded, used and resharded together.
//
// A policy returns whether a module becomes a unit. It is called for every module but the root, children before
// parents. `unclaimed_numel` counts parameter elements below the module, trainable or frozen, that belong to no unit
// yet. At the end these belong to the root's unit. An empty policy makes one unit of the whole model.
using WrapPolicy =
    std::function<bool(const std::string& fqn, const torch::nn::Module& module, int64_t unclaimed_numel)>;

// Makes a unit of each module of these types: wrap_modules<BlockImpl>() (FSDP's transformer_auto_wrap_policy). A type
// may be a common base class.
template <class... Modules>
WrapPolicy wrap_modules() {
  static_assert((... && !torch::detail::is_module_holder<Modules>::value),
                "wrap_modules: that is a holder; a module is an object of the class that ends in Impl");
  return [](const std::string&, const torch::nn::Module& module, int64_t) {
    return (... || (dynamic_cast<const Modules*>(&module) != nullptr));
  };
}

// Makes a unit of each module with at least min_numel unclaimed elements (FSDP's size_based_auto_wrap_policy). Throws
// std::invalid_argument if min_numel < 1.
WrapPolicy wrap_by_size(int64_t min_numel);

// Makes a unit of each module for which `predicate` returns true; fqn is the module's dotted name.
WrapPolicy wrap_if(std::function<bool(const std::string& fqn, const torch::nn::Module& module)> predicate);

}  // namespace tessera
