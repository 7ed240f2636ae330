#include "tessera/flat/model_shards.h"

#include <c10/core/GradMode.h>

namespace tessera {

std::vector<at::Tensor> ModelShards::parameters() const {
  std::vector<at::Tensor> leaves;
  for (const NamedShard& shard : named_shards()) leaves.push_back(shard.tensor);
  return leaves;
}

torch::OrderedDict<std::string, at::Tensor> ModelShards::named_parameters() const {
  torch::OrderedDict<std::string, at::Tensor> leaves;
  for (const NamedShard& shard : named_shards()) leaves.insert(shard.fqn, shard.tensor);
  return leaves;
}

void ModelShards::zero_grad(bool set_to_none) {
  at::NoGradGuard no_grad;
  for (const at::Tensor& leaf : parameters()) {
    if (!leaf.grad().defined()) continue;
    set_to_none ? leaf.mutable_grad().reset() : static_cast<void>(leaf.mutable_grad().zero_());
  }
}

}  // namespace tessera
