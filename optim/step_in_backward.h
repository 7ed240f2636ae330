#pragma once

#include <ATen/core/Tensor.h>

#include <future>
#include <optional>
#include <vector>

#include "tessera/async/task_queue.h"
#include "tessera/flat/gradient_source.h"
#include "tessera/optim/partial_step.h"

namespace tessera {

// Whether, and how, StepInBackward clips gradients.
struct StepInBackwardOptions {
  // Clips gradients by their global norm. It is known when all are there: finish() then takes all steps at once.
  std::optional<double> max_norm;
  double norm_type = 2.0;
};

// Takes the optimizer's step unit by unit, on a thread of its own, as gradients arrive and while
// backward goes on (ZeRO-Offload's overlap of the CPU optimizer with backward).
//
//   HostAdamW optimizer(fsdp.parameters(), torch::optim::AdamWOptions(3e-4));
//   StepInBackward step(fsdp, optimizer);
//   for (...) {
//     optimizer.zero_grad();
//     loss_of(fsdp(x)).backward();  // inside no_sync(): accumulates, as ever
//     step.finish();                // in place of optimizer.step()
//   }
//
// Every backward that reduces is a step, with the same results as optimizer.step() after it. Between backward and
// finish() nobody else touches parameters, gradients and optimizer. Not for loss scaling (ShardedGradScaler), which may
// have to leave a step out, nor FsdpOptions::check_finite, which finds out too late and which the wrapper refuses. A
// unit whose gradients come in parts in one backward (several checkpointed blocks use it) throws std::logic_error.
class StepInBackward {
 public:
  // Both outlive this object.
  StepInBackward(GradientSource& source, PartialStep& optimizer, StepInBackwardOptions options = {});
  ~StepInBackward();
  StepInBackward(const StepInBackward&) = delete;
  StepInBackward& operator=(const StepInBackward&) = delete;

  // Waits until every parameter with a gradient of this backward has been stepped. Throws what a step threw. With
  // max_norm: collective, and returns the norm before clipping.
  std::optional<double> finish();

 private:
  void arrived(const std::vector<at::Tensor>& parameters);
  void wait_for_steps();

  GradientSource& source_;
  PartialStep& optimizer_;
  const StepInBackwardOptions options_;
  std::vector<at::Tensor> deferred_;  // with max_norm

  std::vector<std::future<void>> steps_;  // of this backward
  TaskQueue worker_{1};                   // after what its tasks use
  std::optional<Scope> subscription_;
};

}  // namespace tessera
