#pragma once

#include <map>
#include <set>

#include "tests/support/reference.h"

namespace tessera::testing_support {
using namespace internal;

// A module with parameters of many shapes in two units, which forward does not use. Tests set the gradients, so
// optimizers can be compared bit for bit at any number of ranks.
struct BareImpl : torch::nn::Module {
  explicit BareImpl(at::ScalarType dtype = at::kFloat) {
    auto part = [&](const char* name, const std::vector<std::pair<const char*, at::Tensor>>& parameters) {
      auto module = std::make_shared<Part>();
      for (const auto& [key, value] : parameters) module->register_parameter(key, value.to(dtype));
      register_module(name, module);
    };
    part("a", {{"square", torch::randn({24, 24})},
               {"tall", torch::randn({70, 9})},
               {"bias", torch::randn({13})},
               {"scalar", torch::randn({})},
               {"transposed", torch::randn({12, 33}).t()}});
    part("b", {{"wide", torch::randn({5, 130})},
               {"conv", torch::randn({4, 3, 3, 3})},
               {"empty", torch::randn({0, 4})},
               {"large", torch::randn({40, 41})},
               {"one", torch::randn({1})}});
  }
  at::Tensor forward(at::Tensor x) { return x; }

 private:
  struct Part : torch::nn::Module {};
};
TORCH_MODULE(Bare);

// Returns the gradient of a parameter in a step, equal in every layout. In each step one parameter has none.
inline at::Tensor given_gradient(const std::string& name, const std::vector<int64_t>& sizes, int step) {
  const auto seed = std::hash<std::string>()(name) % 1000 + 1000 * step;
  return seeded(seed, [&] { return torch::randn(sizes) * (step % 2 == 0 ? 1.0 : 0.01); });
}
inline bool has_gradient(const std::string& name, int step) {
  static const char* const kWithout[] = {"a.tall", "b.one", "b.large"};
  return name != kWithout[step % 3];
}

inline void give_gradients(const std::vector<NamedShard>& shards, int step) {
  for (const NamedShard& shard : shards) {
    at::Tensor leaf = shard.tensor;
    leaf.mutable_grad() = at::Tensor();
    if (!has_gradient(shard.fqn, step)) continue;
    at::Tensor whole = torch::empty_strided(shard.sizes, shard.strides, at::TensorOptions(leaf.device()));
    whole.copy_(given_gradient(shard.fqn, shard.sizes, step));
    if (leaf.sizes() != at::IntArrayRef(shard.sizes))
      whole = whole.as_strided({whole.numel()}, {1}).narrow(0, shard.held.begin, shard.held.numel());
    leaf.mutable_grad() = whole.to(leaf.scalar_type()).clone();
  }
}

}  // namespace tessera::testing_support
