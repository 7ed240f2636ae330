#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <unordered_set>
#include <vector>

#include <tessera/detail/partial_step.h>
#include <tessera/gradient_source.h>

namespace tessera {

namespace internal {
class TaskQueue;
}

// Whether, and how, StepInBackward clips gradients.
struct StepInBackwardOptions {
  // Clips gradients by their global norm. It is known when all are there: finish() then takes all steps at once.
  std::optional<double> max_norm;
  double norm_type = 2.0;
  // With max_norm: steps are taken in backward as if the norm would not clip, and if it does, finish() takes them back
  // and takes them again, with clipped gradients. Bit for bit what it is without, and faster where norms seldom clip.
  // Costs copies of parameters and state beside the state, on its tier: 12 bytes for each element of fp32 that is on
  // this rank, 16 with amsgrad.
  bool speculative = false;
  // Of the machine's processors (as taskset counts them), those that the steps' threads run on, and no others, one
  // thread each; empty: wherever the system puts them, as many as the caller has. The program's own threads go where
  // they went: `taskset`, or the launcher, keeps them off these.
  std::vector<int> processors;
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
// Every backward that reduces is a step, with the same results as optimizer.step() after it: finish() also steps what
// has a gradient of before alone, kept by zero_grad(false), say. Between backward and finish() nobody else touches
// parameters, gradients and optimizer. Not for loss scaling (ShardedGradScaler), which may have to leave a step out,
// nor FsdpOptions::check_finite, which finds out too late and which the wrapper refuses. A unit whose gradients come in
// parts in one backward (several checkpointed blocks use it) throws std::logic_error.
//
// Note [Speculation]. With `speculative` (SuperOffload's speculation, then validation: Lian et al., 2025, with copies
// in place of its inverse arithmetic) a backward that fails, and a finish() that throws, leave parameters and optimizer
// as they were before that backward (if a disk does not let them, the next finish() tries again). Until finish() the
// wrapper's forward(), summon_full_params() and full_state_dict() throw std::logic_error, so that nobody computes with
// values that may be taken back.
class StepInBackward {
 public:
  // Both outlive this object. Throws std::invalid_argument for `speculative` without max_norm, and with an optimizer
  // that has no revocable_steps(), by its class, for one whose class is derived from one of Tessera's optimizers, whose
  // own step() would not be called, and for processors that this process may not use.
  StepInBackward(GradientSource& source, PartialStep& optimizer, StepInBackwardOptions options = {});
  // Takes speculative steps back that no finish() has confirmed.
  ~StepInBackward();
  StepInBackward(const StepInBackward&) = delete;
  StepInBackward& operator=(const StepInBackward&) = delete;

  // Waits until every parameter with a gradient has been stepped; without a backward that has reduced since the last
  // call there is nothing to do. Throws what a step threw. With max_norm: collective, and returns the norm before
  // clipping.
  std::optional<double> finish();

  // How many times finish() has taken speculative steps back because the norm clipped.
  int64_t times_taken_back() const { return times_taken_back_; }

 private:
  void arrived(const std::vector<at::Tensor>& parameters);
  void speculate(const std::vector<at::Tensor>& parameters);
  std::vector<at::Tensor> take_others();
  double finish_speculation();
  void take_back();
  void forget_speculation();
  void abandon() noexcept;
  void wait_for_steps();

  GradientSource& source_;
  PartialStep& optimizer_;
  const StepInBackwardOptions options_;
  const std::unique_ptr<RevocableSteps> speculation_;   // null: none
  std::vector<at::Tensor> deferred_;                    // with max_norm: those of this backward
  std::unordered_set<const c10::TensorImpl*> arrived_;  // of this backward
  std::optional<Scope> refusal_;                        // while there are any
  bool must_be_taken_back_ = false;                     // they, what abandon() could not do
  int64_t times_taken_back_ = 0;

  std::vector<std::future<void>> steps_;               // of this backward
  const std::unique_ptr<internal::TaskQueue> worker_;  // after what its tasks use
  std::optional<Scope> subscription_;
};

}  // namespace tessera
