#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <tessera/detail/partial_step.h>
#include "core/gradients/gradient_guard.h"
#include "core/memory/pinned_pool.h"
#include "core/runtime/copy_engine.h"

namespace tessera::internal {

struct HostStepOptions {
  PinnedPoolOptions memory;  // for the copies and the gradients, of the parameters' device
  // Those on the device go as soon as they have left, and a guard is in their place.
  bool drops_gradients = false;
  std::function<std::string(const at::Tensor&)> label = {};  // of a parameter, for the guard's errors
};

// Takes an optimizer's step in host memory for parameters that stay on their device. Each has a copy in host memory,
// which a second optimizer of the same class steps, and which is renewed if somebody else wrote to the parameter. (Past
// its version, through .data(), a device sees that by sums of its values before the step and after the one before.)
// That one has the states for the time of a step: between steps they are where state dictionaries and checkpoints look.
class HostStep {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  using Factory = std::function<std::unique_ptr<torch::optim::Optimizer>(Groups)>;
  HostStep(Factory make, HostStepOptions options);
  ~HostStep();

  // What optimizer.step() does, with its groups and options as they are now. Throws std::runtime_error beyond the
  // memory's limit and std::logic_error, naming the parameter, for a gradient that an earlier step has dropped, with
  // nothing changed.
  void step(torch::optim::Optimizer& optimizer);

  int64_t host_bytes() const { return pool_.lent_bytes(); }

 private:
  struct HostCopy {
    at::Tensor parameter;
    at::Tensor host;                    // of its sizes, and of the strides that it had first
    uint32_t seen_version = 0;          // of the parameter, when both were the same
    const void* seen_memory = nullptr;  // the same
    at::Tensor seen_sums;               // the same, on a device: sums of its values
    size_t number = 0;                  // of the parameter, in the guard
    size_t place = 0;                   // in a step's work
    Copy arriving;                      // the gradient
    Copy leaving;                       // the new values
  };

  void rebuild(torch::optim::Optimizer& optimizer);
  HostCopy copy_of(const at::Tensor& parameter);
  void renew(HostCopy& copy);
  void look_for_writes(const std::vector<HostCopy*>& work);
  void renew_if_written(HostCopy& copy);
  void start_gradient(HostCopy& copy);
  void finish_gradient(HostCopy& copy);
  void start_return(HostCopy& copy);
  void finish_return(HostCopy& copy);
  void step_all(const std::vector<HostCopy*>& work);
  void step_one_by_one(const std::vector<HostCopy*>& work, PartialStep& partial);

  const Factory make_;
  const std::function<std::string(const at::Tensor&)> label_;
  std::vector<at::Tensor> parameters_;      // by number
  std::shared_ptr<GradientGuard> dropped_;  // null: gradients stay
  PinnedPool pool_;
  const std::unique_ptr<CopyEngine> engine_;
  std::vector<HostCopy> host_copies_;
  // On a device, by place in a step's work, whether somebody wrote past the version: [work] kBool on the host, there
  // before the step's first gradient is.
  at::Tensor written_;
  std::unique_ptr<torch::optim::Optimizer> host_optimizer_;
};

}  // namespace tessera::internal
