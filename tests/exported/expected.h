#pragma once

#include <torch/torch.h>

#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include <tessera/checkpoint/full_file.h>
#include <tessera/exported.h>
#include <tessera/tessera.h>
#include "checkpoint/format/slice_reader.h"
#include "checkpoint/full_file/find_full_tensors.h"
#include "tests/support/built.h"

namespace tessera::exported_test {
using namespace internal;

inline std::filesystem::path data_file(const std::string& name) {
  return std::filesystem::path(testing_support::built(TESSERA_EXPORTED_DATA)) / name;
}

// Loads an archive of make_data.py; "decoder_meta" has its weights in a separate file.
inline std::shared_ptr<ExportedModule> load(const std::string& name, ExportedOptions options = {}) {
  if (name == "decoder_meta") options.weights = data_file("decoder_meta_weights.safetensors");
  return load_exported(data_file(name + ".pt2"), options);
}

// Python's results for an archive: "input.x", "output.0", "grad.fc.weight", ...
class Expected {
 public:
  explicit Expected(const std::string& name) {
    const SavedTensors saved = find_full_tensors(data_file(name + ".safetensors"));
    SliceReader reader(saved);
    for (const auto& [key, tensor] : saved.tensors) tensors_[key] = reader.read(key, whole_box(tensor.shape));
  }
  const at::Tensor& at(const std::string& key) const { return tensors_.at(key); }
  bool has(const std::string& key) const { return tensors_.contains(key); }
  // Entries with the prefix, keyed by the rest.
  std::map<std::string, at::Tensor> with(const std::string& prefix) const {
    std::map<std::string, at::Tensor> found;
    for (const auto& [key, tensor] : tensors_)
      if (key.starts_with(prefix)) found[key.substr(prefix.size())] = tensor;
    return found;
  }
  NamedInputs inputs() const {
    NamedInputs inputs;
    std::map<std::string, ExportedValue::Named> dictionaries;
    for (const auto& [name, tensor] : with("input.")) {
      const size_t dot = name.find('.');
      if (dot == std::string::npos) inputs.add(name, tensor.clone());
      if (dot != std::string::npos)
        dictionaries[name.substr(0, dot)].emplace_back(name.substr(dot + 1), tensor.clone());
    }
    for (auto& [name, elements] : dictionaries) inputs.add(name, ExportedValue::dict(std::move(elements)));
    return inputs;
  }

 private:
  std::map<std::string, at::Tensor> tensors_;
};

inline void collect_leaves(const ExportedValue& value, std::vector<ExportedValue>& leaves) {
  if (!value.is_sequence() && !value.is_dict()) return leaves.push_back(value);
  for (size_t i = 0; i < value.size(); ++i) collect_leaves(value[i], leaves);
}

// As in make_data.py: the model's loss, or the mean squares of all differentiable outputs.
inline at::Tensor loss_of(const ExportedValue& outputs) {
  if (outputs.is_dict() && outputs.has("loss")) return outputs["loss"].tensor();
  std::vector<ExportedValue> leaves;
  collect_leaves(outputs, leaves);
  at::Tensor loss;
  for (const ExportedValue& leaf : leaves) {
    if (!leaf.is_tensor() || !leaf.tensor().is_floating_point()) continue;
    const at::Tensor own = leaf.tensor().to(at::kFloat).pow(2).mean();
    loss = loss.defined() ? loss + own : own;
  }
  return loss;
}

inline void expect_close(const at::Tensor& got, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  ASSERT_EQ(got.scalar_type(), expected.scalar_type()) << what;
  // Some gradients are only rounding errors: of a bias before a normalisation.
  constexpr double kRelative = 1e-4, kAbsolute = 5e-6;
  EXPECT_TRUE(at::allclose(got.to(at::kDouble), expected.to(at::kDouble), kRelative, kAbsolute))
      << what << " differs by " << (got.to(at::kDouble) - expected.to(at::kDouble)).abs().max();
}

}  // namespace tessera::exported_test
