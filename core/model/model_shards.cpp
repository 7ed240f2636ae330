#include <tessera/model/model_shards.h>

#include <c10/core/GradMode.h>

#include <stdexcept>

namespace tessera {
using namespace internal;

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

std::vector<ModelShards::HeldPart> ModelShards::held_by(int rank) const {
  std::vector<HeldPart> held;
  for (const NamedShard& shard : named_shards()) {
    if (shard.replica_count != comm()->size())
      throw std::logic_error("the part of '" + shard.fqn + "' on rank " + std::to_string(rank) +
                             " is unknown: a wrapper that shards parameters must override ModelShards::held_by()");
    held.push_back({shard.held, rank});
  }
  return held;
}

void ModelShards::zero_grad(bool set_to_none) {
  at::NoGradGuard no_grad;
  for (const at::Tensor& leaf : parameters()) {
    if (!leaf.grad().defined()) continue;
    set_to_none ? leaf.mutable_grad().reset() : static_cast<void>(leaf.mutable_grad().zero_());
  }
}

}  // namespace tessera
