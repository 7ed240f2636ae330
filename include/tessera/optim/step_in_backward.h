#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <unordered_set>
#include <vector>

#include <tessera/detail/gradient_source.h>
#include <tessera/optim/partial_step.h>

namespace tessera {

namespace internal {
class TaskQueue;
}

// Options of StepInBackward: clipping of gradients, and processors for the step.
struct StepInBackwardOptions {
  // Upper limit of the gradients' global norm. The norm is known only after backward, so finish() then takes all steps.
  std::optional<double> max_norm{};
  double norm_type = 2.0;
  // If max_norm is set: takes steps during backward, without clipping. If the norm is too large, finish() rolls them
  // back, and steps with clipped gradients. The option does not change results. Faster if clipping is rare. Keeps
  // copies of parameters and state where these are, on the host, a disk or the device: 12 bytes per fp32 element on
  // this rank, 16 with amsgrad.
  bool speculative = false;
  // Processors (numbered as in taskset) for the step's threads, one thread on each. Empty: as many threads as the
  // caller has, on any processors. Other threads may still run on these processors; `taskset` or the launcher can
  // exclude them.
  std::vector<int> processors{};
};

// Runs the optimizer's step unit by unit during backward, on a thread of this object, as gradients become final
// (ZeRO-Offload's overlap of the CPU optimizer with backward).
//
//   HostAdamW optimizer(fsdp.parameters(), torch::optim::AdamWOptions(3e-4));
//   StepInBackward step(fsdp, optimizer);
//   for (...) {
//     optimizer.zero_grad();
//     loss_of(fsdp(x)).backward();  // inside no_sync(): accumulates
//     step.finish();                // in place of optimizer.step()
//   }
//
// Every backward that reduces gradients is a step, with the results of optimizer.step(). finish() also steps parameters
// that have only an older gradient, for example after zero_grad(false). Between backward and finish(), parameters,
// gradients and the optimizer must not be used. finish() steps parameters on a device (OffloadOptions::device_fraction)
// on its caller's stream. Must not be used with ShardedGradScaler, which may skip a step, or FsdpOptions::check_finite,
// whose check would run after the steps. Without max_norm, or with `speculative`, the wrapper's forward(),
// summon_full_params() and full_state_dict() throw std::logic_error before finish(). If several checkpointed blocks use
// one unit, its gradients arrive in several parts, and backward throws std::logic_error.
//
// Note [Speculation]. `speculative` implements SuperOffload's speculation-then-validation (Lian et al., 2025), with
// copies instead of inverse arithmetic. If backward or finish() fails, parameters and optimizer are restored to their
// values before that backward. If a disk prevents this, the next finish() tries again.
class StepInBackward {
 public:
  // `source` and `optimizer` must outlive this object. Throws like GradientSource::on_gradients(). Throws
  // std::invalid_argument for `speculative` without max_norm or without revocable_steps(), and for processors that this
  // process may not use. Also throws std::invalid_argument if the optimizer's class is derived from one of Tessera's,
  // because a step() of the derived class would be bypassed.
  StepInBackward(internal::GradientSource& source, PartialStep& optimizer, StepInBackwardOptions options = {});
  // Rolls back speculative steps that finish() has not confirmed.
  ~StepInBackward();
  StepInBackward(const StepInBackward&) = delete;
  StepInBackward& operator=(const StepInBackward&) = delete;

  // Blocks until every parameter with a gradient has been stepped. Steps nothing if no backward has reduced gradients
  // since the last call. Throws the error of a failed step. If max_norm is set, first clips the gradients, is
  // collective, and returns the norm before clipping. Otherwise returns nullopt.
  std::optional<double> finish();

  // Returns the number of finish() calls that have rolled back speculative steps.
  int64_t times_taken_back() const { return times_taken_back_; }

  // Returns the OffloadOptions::device_fraction with which the host's steps would have ended with backward: the present
  // fraction plus the fraction that the last finish() waited for. From 0 to 1; 1 with max_norm but without
  // `speculative`, because no step overlaps backward. Ranks may differ: use the largest.
  double suggested_device_fraction() const { return suggested_device_fraction_; }

 private:
  void arrived(const std::vector<at::Tensor>& parameters);
  void speculate(const std::vector<at::Tensor>& parameters);
  std::vector<at::Tensor> take_others();
  double finish_speculation();
  void step_on_host(const std::vector<at::Tensor>& parameters);
  void forget_speculation();
  void abandon() noexcept;
  void wait_for_steps();
  void suggest_fraction(double waited_s, const std::vector<at::Tensor>& on_device);

  internal::GradientSource& source_;
  PartialStep& optimizer_;
  const StepInBackwardOptions options_;
  const std::unique_ptr<PartialStep::RevocableSteps> speculation_;  // null: not speculative
  std::vector<at::Tensor> deferred_;                                // parameters that finish() steps, or steps again
  std::unordered_set<const c10::TensorImpl*> arrived_;              // parameters whose gradients arrived since finish()
  std::optional<ScopeExit> refusal_;                                // set while steps are in flight or unconfirmed
  bool must_be_taken_back_ = false;                                 // true: abandon() failed; finish() must roll back
  int64_t times_taken_back_ = 0;
  double suggested_device_fraction_ = 0;

  struct HostSteps {
    int64_t elements = 0;
    double seconds = 0;
  };
  HostSteps host_steps_;                               // work since finish(); the worker writes it
  std::vector<std::future<void>> steps_;               // steps since finish()
  const std::unique_ptr<internal::TaskQueue> worker_;  // declared after the members that its tasks use
  std::optional<ScopeExit> subscription_;
};

}  // namespace tessera
