#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <tessera/optim/partial_step.h>
#include "core/gradients/grad_placeholder.h"
#include "core/memory/pinned_pool.h"
#include "core/runtime/copy_engine.h"

namespace tessera::internal {

struct HostStepOptions {
  PinnedPoolOptions memory;  // for the host copies of parameters and gradients
  // Frees a gradient on the device after its copy to the host, and puts a placeholder into `.grad`.
  bool drops_gradients = false;
  std::function<std::string(const at::Tensor&)> label = {};  // names a parameter in the placeholders' errors
};

// Runs an optimizer's step in host memory, for parameters that stay on their device. Each parameter has a host copy,
// and a second optimizer of the same class steps these copies. Each step first updates the copies of parameters that
// changed since the last step. Version counters do not reveal writes through .data(). For parameters on a device, sums
// of the values after a step are therefore compared with sums before the next step. The second optimizer holds the
// states only during a step. Between steps, the first optimizer holds them, for state dictionaries and checkpoints.
class HostStep {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  using Factory = std::function<std::unique_ptr<torch::optim::Optimizer>(Groups)>;
  HostStep(Factory make, HostStepOptions options);
  ~HostStep();

  // Runs the step of `optimizer`, with its current groups and options. Throws std::runtime_error if memory would exceed
  // its limit. Throws std::logic_error, naming the parameter, for a gradient that an earlier step freed. In both cases
  // no parameter changes.
  void step(torch::optim::Optimizer& optimizer);

  int64_t host_bytes() const { return pool_.lent_bytes(); }

 private:
  struct HostCopy {
    at::Tensor parameter;
    at::Tensor host;                    // the parameter's values, with its sizes, and its strides at construction
    uint32_t seen_version = 0;          // version of the parameter when `host` last equaled it
    const void* seen_memory = nullptr;  // address of the parameter when `host` last equaled it
    at::Tensor seen_sums;               // value_sums() when `host` last equaled it; only on a device
    size_t number = 0;                  // index of the parameter in `dropped_`
    size_t place = 0;                   // index in the work list of a step
    Copy arriving;                      // copy of the gradient to the host
    Copy leaving;                       // copy of the new values to the device
  };

  void rebuild(torch::optim::Optimizer& optimizer);
  HostCopy copy_of(const at::Tensor& parameter);
  void renew(HostCopy& copy);
  void look_for_writes(const std::vector<HostCopy*>& work);
  void renew_if_written(HostCopy& copy);
  at::Tensor memory_of_gradient(const HostCopy& copy);  // undefined if only an operator can copy the gradient
  void start_gradient(HostCopy& copy);
  void finish_gradient(HostCopy& copy);
  void start_return(HostCopy& copy);
  void finish_return(HostCopy& copy);
  void step_all(const std::vector<HostCopy*>& work);
  void step_one_by_one(const std::vector<HostCopy*>& work, PartialStep& partial);

  const Factory make_;
  const std::function<std::string(const at::Tensor&)> label_;
  const bool is_limited_;
  std::vector<at::Tensor> parameters_;        // by HostCopy::number
  std::shared_ptr<GradPlaceholder> dropped_;  // null if gradients are kept
  PinnedPool pool_;
  const std::unique_ptr<CopyEngine> engine_;
  std::vector<HostCopy> host_copies_;
  // For parameters on a device: one flag for each parameter of a step, set if value_sums() differ from those after the
  // last step. A kBool tensor on the host, valid after the step's first gradient has arrived.
  at::Tensor written_;
  std::unique_ptr<torch::optim::Optimizer> host_optimizer_;
};

}  // namespace tessera::internal
