#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

namespace tessera {

// torch::optim::Adam and AdamW with one call of libtorch's fused kernel for all parameters of a
// group, dtype and device, instead of some ten operators for each parameter: same results to
// rounding, same options, states and archives. Under FullyShardedDataParallel these are all the
// shards of a rank.
//
// Parameters are of floating-point type and dense; gradients may have any strides. step() throws
// std::invalid_argument for others (sparse gradients, complex parameters).
class Adam : public torch::optim::Adam {
 public:
  using torch::optim::Adam::Adam;
  at::Tensor step(LossClosure closure = nullptr) override;
};

class AdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace tessera
