#pragma once

#include <torch/torch.h>

#include <functional>
#include <vector>

namespace tessera::testing_support {

// Visits this rank's shards and their moments, without recording gradients. A shard without a step has no moments.
inline void for_each_shard_and_moment(const std::vector<at::Tensor>& shards, torch::optim::Adam& adam,
                                      const std::function<void(const at::Tensor&)>& visit) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& shard : shards) {
    visit(shard.detach());
    const auto found = adam.state().find(shard.unsafeGetTensorImpl());
    if (found == adam.state().end()) continue;
    auto& state = static_cast<torch::optim::AdamParamState&>(*found->second);
    visit(state.exp_avg());
    visit(state.exp_avg_sq());
  }
}

}  // namespace tessera::testing_support
