#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <unordered_map>

#include <tessera/communicator.h>

namespace tessera {

// Options of ShardedGradScaler: torch.amp.GradScaler's arguments.
struct GradScalerOptions {
  double initial_scale = 65536.0;  // the first scale; above 0, and finite in fp32 like its reciprocal
  double growth_factor = 2.0;      // 1 or more; multiplies the scale after growth_interval successive finite steps
  double backoff_factor = 0.5;     // between 0 and 1; multiplies the scale after an infinite or NaN gradient
  int64_t growth_interval = 2000;  // successive finite steps before the scale grows; 1 or more
};

// Loss scaling for fp16 (torch.amp.GradScaler, FSDP1's ShardedGradScaler). Multiplies the loss by a scale, so that
// small gradients are representable in fp16. Divides the gradients by the scale before the step. If any rank has an
// infinite or NaN gradient, all ranks skip the step.
//
//   tessera::ShardedGradScaler scaler(comm);
//   scaler.scale(loss).backward();
//   scaler.unscale_(optimizer);       // needed only if gradients are used before the step
//   fsdp.clip_grad_norm_(1.0);
//   scaler.step(optimizer);           // instead of optimizer.step()
//   scaler.update();
//
// Works with every wrapper and any torch::optim optimizer, also for complex and sparse gradients. Must be used by one
// thread.
class ShardedGradScaler {
 public:
  // Throws std::invalid_argument for options out of range and for a null communicator.
  explicit ShardedGradScaler(std::shared_ptr<Communicator> comm, GradScalerOptions options = {});

  // Returns loss * get_scale(), recorded by autograd.
  at::Tensor scale(const at::Tensor& loss) const;

  // Divides the optimizer's gradients by the scale, and checks that they are finite on all ranks. Is collective: one
  // all-reduce of one number. Throws std::logic_error if called twice for an optimizer without an update() in between.
  void unscale_(torch::optim::Optimizer& optimizer);

  // Calls unscale_() if the caller has not. If all ranks' gradients are finite, steps the optimizer and returns true;
  // otherwise returns false. Throws std::logic_error if called twice for an optimizer without an update() in between.
  bool step(torch::optim::Optimizer& optimizer);

  // Ends the step, and raises, lowers or keeps the scale. Keeps it if fp32 cannot represent the new scale or its
  // reciprocal. Throws std::logic_error if neither unscale_() nor step() was called since the last update().
  void update();

  double get_scale() const { return scale_; }  // the current scale

  // The state for checkpoints. Must be loaded between update() and scale().
  struct State {
    double scale = 0;
    int64_t finite_steps = 0;  // successive finite steps since the scale changed
  };
  State state() const { return {scale_, finite_steps_}; }  // equal on all ranks; must be called after update()
  // Continues from `state`. Throws std::invalid_argument if state.scale is not a valid initial_scale, or finite_steps
  // is negative.
  void load_state(State state);

 private:
  struct Seen {
    bool is_finite = false;  // false also if unscale_() threw, so that step() skips the optimizer's step
    bool has_stepped = false;
  };

  const std::shared_ptr<Communicator> comm_;
  const GradScalerOptions options_;
  double scale_;
  int64_t finite_steps_ = 0;
  std::unordered_map<torch::optim::Optimizer*, Seen> seen_;  // optimizers unscaled since the last update()
};

}  // namespace tessera
