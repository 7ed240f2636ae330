#include "core/layout/unit_plan.h"

#include <numeric>
#include <unordered_map>
#include <utility>

namespace tessera::internal {

std::string join_names(const std::string& module, const std::string& name) {
  return module.empty() ? name : module + "." + name;
}

namespace {

// Walks the module tree three times: to find each parameter's first name, to call the policy (children before parents),
// and to assign the parameters to units.
class Planner {
 public:
  explicit Planner(const WrapPolicy& policy) : policy_(policy) {}

  std::vector<PlannedUnit> plan(const torch::nn::Module& root, const ParameterPolicies& policies) {
    full_precision_ = modules_below(root, policies.full_precision);
    for (const torch::nn::Module* module : modules_below(root, policies.ignored))
      for (const auto& parameter : module->parameters(/*recurse=*/false))
        ignored_.insert(parameter.unsafeGetTensorImpl());
    find_first_modules(root);
    claim(root, "", true);
    units_.push_back({PlannedUnit::kRoot, {}});
    collect(root, "", 0);
    std::erase_if(units_, [](const PlannedUnit& unit) { return unit.parameters.empty(); });
    return std::move(units_);
  }

 private:
  bool is_ignored(const at::Tensor& parameter) const { return ignored_.contains(parameter.unsafeGetTensorImpl()); }

  void find_first_modules(const torch::nn::Module& module) {
    for (const auto& parameter : module.named_parameters(/*recurse=*/false))
      first_modules_.try_emplace(parameter.value().unsafeGetTensorImpl(), &module);
    for (const auto& child : module.named_children()) find_first_modules(*child.value());
  }

  // Calls the policy on the modules below this one, then on this one. Returns 0 if the policy selects this one, else
  // the number of elements in all of these modules that no unit has claimed.
  int64_t claim(const torch::nn::Module& module, const std::string& fqn, bool is_root) {
    if (!asked_.insert(&module).second) return 0;  // visited before, under its first name
    int64_t unclaimed_numel = 0;
    for (const auto& child : module.named_children())
      unclaimed_numel += claim(*child.value(), join_names(fqn, child.key()), false);
    for (const auto& parameter : module.named_parameters(/*recurse=*/false))
      if (!is_ignored(parameter.value()) && first_modules_.at(parameter.value().unsafeGetTensorImpl()) == &module)
        unclaimed_numel += parameter.value().numel();
    if (is_root || !policy_ || !policy_(fqn, module, unclaimed_numel)) return unclaimed_numel;
    claimed_.insert(&module);
    return 0;
  }

  void collect(const torch::nn::Module& module, const std::string& fqn, size_t unit) {
    if (claimed_.erase(&module) > 0) {
      unit = units_.size();
      units_.push_back({fqn, {}});
    }
    for (const auto& entry : module.named_parameters(/*recurse=*/false)) {
      const at::Tensor& tensor = entry.value();
      if (!tensor.defined() || is_ignored(tensor)) continue;
      const std::string name = join_names(fqn, entry.key());
      auto& parameters = units_[unit].parameters;
      const auto [known, is_new] = places_.try_emplace(tensor.unsafeGetTensorImpl(), unit, parameters.size());
      if (is_new) parameters.push_back({name, {}, tensor, full_precision_.contains(&module)});
      const auto [owner, index] = known->second;  // a tied weight belongs to the unit of its first name
      if (!is_new) units_[owner].parameters[index].aliases.push_back(name);
    }
    for (const auto& child : module.named_children()) collect(*child.value(), join_names(fqn, child.key()), unit);
  }

  const WrapPolicy& policy_;
  std::unordered_set<const torch::nn::Module*> full_precision_;
  std::unordered_set<const c10::TensorImpl*> ignored_;
  std::unordered_set<const torch::nn::Module*> asked_, claimed_;
  std::unordered_map<const c10::TensorImpl*, const torch::nn::Module*> first_modules_;
  std::unordered_map<const c10::TensorImpl*, std::pair<size_t, size_t>> places_;  // {unit, index in the unit}
  std::vector<PlannedUnit> units_;
};

}  // namespace

std::vector<PlannedUnit> plan_units(const torch::nn::Module& root, const WrapPolicy& policy,
                                    const ParameterPolicies& parameters) {
  return Planner(policy).plan(root, parameters);
}

std::vector<bool> first_units(const std::vector<PlannedUnit>& plan, double fraction) {
  std::vector<double> numels(plan.size(), 0);
  for (size_t i = 0; i < plan.size(); ++i)
    for (const PlannedParameter& parameter : plan[i].parameters)
      numels[i] += static_cast<double>(parameter.tensor.numel());
  double room = fraction * std::accumulate(numels.begin(), numels.end(), 0.0);
  std::vector<bool> chosen;
  for (const double numel : numels) {
    chosen.push_back(fraction > 0 && numel <= room);
    if (chosen.back()) room -= numel;
  }
  return chosen;
}

std::unordered_set<const torch::nn::Module*> modules_below(const torch::nn::Module& root, const WrapPolicy& policy) {
  std::unordered_set<const torch::nn::Module*> found;
  if (!policy) return found;
  auto walk = [&](auto& self, const torch::nn::Module& module, const std::string& fqn, bool inside) -> void {
    if (!inside && &module != &root) {
      int64_t numel = 0;
      for (const auto& parameter : module.parameters()) numel += parameter.numel();
      inside = policy(fqn, module, numel);
    }
    if (inside) found.insert(&module);
    for (const auto& child : module.named_children()) self(self, *child.value(), join_names(fqn, child.key()), inside);
  };
  walk(walk, root, "", false);
  return found;
}

}  // namespace tessera::internal
