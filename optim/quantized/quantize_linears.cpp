#include <tessera/quantize_linears.h>

#include <torch/nn/modules/linear.h>

#include <stdexcept>
#include <unordered_map>
#include <unordered_set>

#include <tessera/detail/linear_weights.h>
#include "core/layout/deferred.h"
#include "core/layout/unit_plan.h"
#include "core/memory/without_data.h"
#include "core/paging/residency.h"

#include "core/runtime/require.h"
#include "optim/quantized/quantized_weight.h"

namespace tessera {
using namespace internal;
namespace {

// Returns the weights of all Linear and HasLinearWeights modules. Names are relative to `root`.
std::vector<LinearWeight> weights_below(torch::nn::Module& root) {
  std::vector<LinearWeight> found;
  std::unordered_set<const torch::nn::Module*> seen;
  auto walk = [&](auto& self, torch::nn::Module& module, const std::string& fqn) -> void {
    if (!seen.insert(&module).second) return;
    if (auto* linear = dynamic_cast<torch::nn::LinearImpl*>(&module))
      found.push_back({linear, join_names(fqn, "weight"), "weight", &linear->weight});
    if (auto* other = dynamic_cast<HasLinearWeights*>(&module))
      for (LinearWeight& weight : other->linear_weights()) {
        weight.fqn = join_names(fqn, weight.fqn);
        found.push_back(weight);
      }
    for (const auto& child : module.named_children()) self(self, *child.value(), join_names(fqn, child.key()));
  };
  walk(walk, root, "");
  return found;
}

std::shared_ptr<QuantizedWeight> quantized(const LinearWeight& weight) {
  return std::dynamic_pointer_cast<QuantizedWeight>(stand_in_of(*weight.used));
}

std::string name_of_layer(const LinearWeight& weight) {
  const size_t dot = weight.fqn.rfind('.');
  return weight.name != "weight" ? weight.fqn : dot == std::string::npos ? "(root)" : weight.fqn.substr(0, dot);
}

// Returns, for each tensor, the number of its registrations over all modules and names.
std::unordered_map<const c10::TensorImpl*, int> places_of_parameters(const torch::nn::Module& root) {
  std::unordered_map<const c10::TensorImpl*, int> places;
  std::unordered_set<const torch::nn::Module*> seen;
  auto walk = [&](auto& self, const torch::nn::Module& module) -> void {
    if (!seen.insert(&module).second) return;
    for (const auto& entry : module.named_parameters(/*recurse=*/false)) ++places[entry.value().unsafeGetTensorImpl()];
    for (const auto& child : module.named_children()) self(self, *child.value());
  };
  walk(walk, root);
  return places;
}

std::string problem_of(const LinearWeight& weight, int places, WeightFormat format) {
  const at::Tensor& tensor = *weight.used;
  if (quantized(weight)) return "is quantized already";
  if (is_paged(tensor)) return "is sharded already: quantize before wrapping";
  if (is_deferred(tensor) && reader_of(tensor) == nullptr && !is_deferring())
    return "is deferred: quantize inside deferred(), or call materialize() on the module first";
  if (places != 1)
    return "is tied, registered under " + std::to_string(places) + " names: leave it out (QuantizeOptions::which)";
  if (!at::isFloatingType(tensor.scalar_type()) || tensor.dim() != 2)
    return c10::str("is ", tensor.scalar_type(), " of shape ", tensor.sizes(), ", expected a floating-point matrix");
  if (format != WeightFormat::kFull && !is_deferred(tensor) && !is_without_data() &&
      !at::isfinite(tensor.detach()).all().item<bool>())
    return "has elements that are infinite or NaN";
  return weight.owner->weak_from_this().expired() ? "belongs to a module that no std::shared_ptr holds" : "";
}

void check(const LoraOptions& lora) {
  require(lora.rank >= 0, "QuantizeOptions::lora.rank is ", lora.rank, ", expected 0 or more");
  require(lora.alpha > 0, "QuantizeOptions::lora.alpha is ", lora.alpha, ", expected more than 0");
  require(lora.dropout >= 0 && lora.dropout < 1, "QuantizeOptions::lora.dropout is ", lora.dropout,
          ", expected 0 or more and below 1");
}

}  // namespace

std::vector<std::string> quantize_linears(torch::nn::Module& module, const QuantizeOptions& options) {
  check(options.lora);
  if (options.format == WeightFormat::kFull && options.lora.rank == 0)
    throw std::invalid_argument("QuantizeOptions: a format of kFull without adapters changes nothing");
  std::vector<LinearWeight> chosen;
  const auto places = places_of_parameters(module);
  for (const LinearWeight& weight : weights_below(module)) {
    const std::string layer = name_of_layer(weight);
    if (options.which && !options.which(layer, *weight.owner, weight.used->numel())) continue;
    const auto known = places.find(weight.used->unsafeGetTensorImpl());
    const std::string problem = problem_of(weight, known == places.end() ? 0 : known->second, options.format);
    if (!problem.empty()) throw std::invalid_argument("quantize_linears: '" + weight.fqn + "' " + problem);
    chosen.push_back(weight);
  }
  require(!chosen.empty(), "quantize_linears: no Linear layer in the model, or none that `which` names");
  if (options.freeze_others)
    for (at::Tensor& parameter : module.parameters())
      if (parameter.requires_grad()) parameter.set_requires_grad(false);
  std::vector<std::string> names;
  for (const LinearWeight& weight : chosen) {
    *weight.used =
        QuantizedWeight::make(*weight.owner, weight.name, weight.fqn, options.format, options.lora)->handle();
    names.push_back(name_of_layer(weight));
  }
  return names;
}

void merge_adapters(torch::nn::Module& module) {
  for (const LinearWeight& weight : weights_below(module))
    if (const auto own = quantized(weight)) own->merge();
}

void unmerge_adapters(torch::nn::Module& module) {
  for (const LinearWeight& weight : weights_below(module))
    if (const auto own = quantized(weight)) own->unmerge();
}

torch::OrderedDict<std::string, at::Tensor> dequantized_state(const torch::nn::Module& module,
                                                              const torch::OrderedDict<std::string, at::Tensor>& state,
                                                              bool with_adapters) {
  auto of_name = [&](const std::string& name) {
    const at::Tensor* found = state.find(name);
    if (found == nullptr) throw std::invalid_argument("dequantized_state: '" + name + "' is not in the state");
    return *found;
  };
  std::unordered_map<std::string, at::Tensor> values;  // new values by name; undefined: not in the result
  for (const LinearWeight& weight : weights_below(const_cast<torch::nn::Module&>(module))) {
    const auto own = quantized(weight);
    if (!own) continue;
    at::Tensor a, b;
    if (own->has_adapter()) {
      const std::string prefix = weight.fqn.substr(0, weight.fqn.size() - weight.name.size());
      const std::string names[] = {prefix + own->adapter_name("a"), prefix + own->adapter_name("b")};
      a = of_name(names[0]), b = of_name(names[1]);
      values[names[0]] = values[names[1]] = at::Tensor();
    }
    values[weight.fqn] = own->values(of_name(weight.fqn), a, b, with_adapters);
  }
  torch::OrderedDict<std::string, at::Tensor> plain;
  for (const auto& entry : state) {
    const auto found = values.find(entry.key());
    if (found == values.end())
      plain.insert(entry.key(), entry.value());
    else if (found->second.defined())
      plain.insert(entry.key(), found->second);
  }
  return plain;
}

}  // namespace tessera
