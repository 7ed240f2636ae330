#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <unordered_map>

#include <tessera/communicator.h>

namespace tessera {

// How the scale begins and changes: torch.amp.GradScaler's arguments.
struct GradScalerOptions {
  double initial_scale = 65536.0;  // above 0
  double growth_factor = 2.0;      // after growth_interval steps in a row with finite gradients; >= 1
  double backoff_factor = 0.5;     // after a step without; between 0 and 1
  int64_t growth_interval = 2000;  // 1 or more
};

// Loss scaling for fp16 (torch.amp.GradScaler, FSDP1's ShardedGradScaler): gradients that fp16 could not represent
// are computed from a scaled loss and divided again before the step, which is left out, on all ranks together, if a
// gradient is infinite or NaN in whichever rank's part.
//
//   tessera::ShardedGradScaler scaler(comm);
//   scaler.scale(loss).backward();
//   scaler.unscale_(optimizer);       // only if the gradients are looked at before the step:
//   fsdp.clip_grad_norm_(1.0);
//   scaler.step(optimizer);           // instead of optimizer.step()
//   scaler.update();
//
// For every wrapper and any torch::optim optimizer. Used by one thread.
class ShardedGradScaler {
 public:
  // Throws std::invalid_argument for factors out of range.
  explicit ShardedGradScaler(std::shared_ptr<Communicator> comm, GradScalerOptions options = {});

  // loss * get_scale(), recorded by autograd.
  at::Tensor scale(const at::Tensor& loss) const;

  // Divides the gradients of the optimizer's parameters by the scale, and finds out whether they are finite on all
  // ranks. Collective: one all-reduce of one number. Throws std::logic_error for a second time in one step.
  void unscale_(torch::optim::Optimizer& optimizer);

  // unscale_(), unless that was done, and optimizer.step() if all gradients were finite: returned, alike on all ranks.
  bool step(torch::optim::Optimizer& optimizer);

  // Ends the step: the scale grows or backs off.
  void update();

  // What losses are multiplied with now.
  double get_scale() const { return scale_; }

  // What a checkpoint needs; load between update() and scale().
  struct State {
    double scale = 0;
    int64_t finite_steps = 0;  // in a row
  };
  // As of the last update(); the same on all ranks.
  State state() const { return {scale_, finite_steps_}; }
  // Goes on from there. Throws std::invalid_argument unless the scale is above 0.
  void load_state(State state);

 private:
  struct Seen {
    bool is_finite = true;
    bool has_stepped = false;
  };

  const std::shared_ptr<Communicator> comm_;
  const GradScalerOptions options_;
  double scale_;
  int64_t finite_steps_ = 0;
  std::unordered_map<torch::optim::Optimizer*, Seen> seen_;  // unscaled since the last update()
};

}  // namespace tessera
