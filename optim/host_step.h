#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "tessera/memory/pinned_pool.h"
#include "tessera/offload/copy_engine.h"
#include "tessera/offload/cpu_offload.h"
#include "tessera/optim/partial_step.h"

namespace tessera {

// Takes an optimizer's step in host memory for parameters that stay on their device.
//
// Each parameter gets a copy in host memory, which a second optimizer of the same class steps. For the
// time of a step that one has the states, so that whoever looks at the first between steps (state
// dictionaries, checkpoints) finds them where they always are. A copy is renewed if its parameter was
// written by somebody else since.
class HostStep {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  using Factory = std::function<std::unique_ptr<torch::optim::Optimizer>(Groups)>;
  HostStep(Factory make, at::Device device, const CpuOffload& offload);
  ~HostStep();

  // What optimizer.step() does, with its groups and options as they are now. Throws std::runtime_error
  // beyond CpuOffload::host_limit_bytes, with nothing changed.
  void step(torch::optim::Optimizer& optimizer);

  int64_t host_bytes() const { return pool_.lent_bytes(); }

 private:
  struct Twin {
    at::Tensor parameter;
    at::Tensor host;            // of its sizes and strides
    uint32_t seen_version = 0;  // of the parameter, when both were the same
    Copy arriving;              // the gradient
    Copy leaving;               // the new values
  };

  void rebuild(torch::optim::Optimizer& optimizer);
  void start_gradient(Twin& twin);
  void start_return(Twin& twin);
  void finish_return(Twin& twin);
  void step_all(const std::vector<Twin*>& work);
  void step_one_by_one(const std::vector<Twin*>& work, PartialStep& partial);

  const Factory make_;
  const CpuOffload offload_;
  PinnedPool pool_;
  const std::unique_ptr<CopyEngine> copies_;
  std::vector<Twin> twins_;
  std::unique_ptr<torch::optim::Optimizer> twin_optimizer_;
};

}  // namespace tessera
