#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/ordered_dict.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "core/model/module_state.h"
#include "fsdp/options.h"
#include "optim/adafactor.h"
#include "optim/adamw_8bit.h"
#include "optim/lbfgs.h"
#include "optim/lion.h"
#include "optim/muon.h"
#include "optim/schedule_free.h"
#include "oss/oss.h"
#include "sdp/replicated/distributed_data_parallel.h"
#include "sdp/sharded_data_parallel.h"

namespace tessera {

// The stage, and the options of each wrapper. The same on all ranks.
struct ZeroOptions {
  // By name, as the module registers them.
  using Parameters = torch::OrderedDict<std::string, at::Tensor>;
  // Parameters with options of their own, as torch's optimizers take them.
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  // What is split over the ranks: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters.
  int stage = 2;
  // Makes the optimizer's groups out of the parameters by name (whole ones, or shards in stage 3).
  // Empty: one group of all.
  std::function<Groups(const Parameters&)> groups;
  // Of what the stage uses: stages 0 and 1; 1 and 2; 2; 3.
  DdpOptions ddp;
  OssOptions oss;
  SdpOptions sdp;
  FsdpOptions fsdp;

  // What `groups` makes of them.
  Groups groups_of(const Parameters& parameters) const {
    return groups ? groups(parameters) : Groups(1, torch::optim::OptimizerParamGroup(parameters.values()));
  }
  // A module's own, each once.
  static Parameters parameters_of(const torch::nn::Module& module) {
    Parameters parameters;
    for (const PlannedParameter& parameter : registered_parameters(module))
      parameters.insert(parameter.fqn, parameter.tensor);
    return parameters;
  }
};

// The optimizer that torch's options belong to: as a type, in decltype().
torch::optim::Adam optimizer_of(const torch::optim::AdamOptions&);
torch::optim::AdamW optimizer_of(const torch::optim::AdamWOptions&);
torch::optim::SGD optimizer_of(const torch::optim::SGDOptions&);
torch::optim::RMSprop optimizer_of(const torch::optim::RMSpropOptions&);
torch::optim::Adagrad optimizer_of(const torch::optim::AdagradOptions&);
Muon optimizer_of(const MuonOptions&);
AdamW8bit optimizer_of(const AdamW8bitOptions&);
Lion optimizer_of(const LionOptions&);
Adafactor optimizer_of(const AdafactorOptions&);
ScheduleFreeAdamW optimizer_of(const ScheduleFreeOptions&);
Lbfgs optimizer_of(const LbfgsOptions&);

// Throws std::invalid_argument for torch's own L-BFGS.
template <class Optimizer>
void refuse_line_searches_of_one_rank() {
  if constexpr (std::is_base_of_v<torch::optim::LBFGS, Optimizer>)
    throw std::invalid_argument(
        "zero<torch::optim::LBFGS>: its line searches follow this rank's loss, and its inner products this rank's "
        "part, so ranks go different ways; use tessera::LbfgsOptions");
}

}  // namespace tessera
