#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <tessera/sharded_optimizer.h>

namespace tessera {

// Shards the state of any torch::optim optimizer, so that each of N ranks holds about 1/N of the state. This is ZeRO
// stage 1 (Rajbhandari et al., 2020; FairScale's OSS, torch's ZeroRedundancyOptimizer).
//
//   tessera::DistributedDataParallel ddp(model, comm);
//   tessera::OSS<torch::optim::Adam> optimizer(model->parameters(), torch::optim::AdamOptions(1e-3), comm);
//   torch::mse_loss(ddp(x), y).backward();
//   optimizer.step();   // each rank updates the parameters that it owns, and sends them to all ranks
//
// Each parameter has one owner, which updates the whole parameter. So optimizers that need whole parameters are exact,
// too. Before step(), gradients must be averaged by DistributedDataParallel, ShardedDataParallel or an all-reduce. With
// an elementwise optimizer, the parameters equal those of the unsharded optimizer bit for bit.
//
// `LocalOptimizer` must have a constructor from groups and options, like torch's optimizers. With torch::optim::LBFGS,
// the constructors throw std::invalid_argument, because its line search needs all parameters. Use tessera::Lbfgs, which
// searches over all ranks together.
template <class LocalOptimizer>  // not named "Optimizer": a base class of that name would hide it
class OSS : public ShardedOptimizer {
 public:
  // Collective. All ranks must pass the same parameters in the same order. A parameter that occurs twice (tied weights)
  // is updated once. The parameters remain the caller's tensors, but small parameters move into shared buckets. If the
  // lists differ between ranks, throws std::invalid_argument with the position of the difference. Also throws it if a
  // parameter is not a leaf, not on the communicator's device, or another wrapper's shard.
  template <class Options>
  OSS(std::vector<at::Tensor> parameters, Options options, std::shared_ptr<Communicator> comm,
      OssOptions oss_options = {})
      : OSS(one_group(std::move(parameters)), std::move(options), std::move(comm), oss_options) {}

  // Like the constructor above, for groups of parameters. Each group may have its own options.
  template <class Options>
  OSS(std::vector<torch::optim::OptimizerParamGroup> groups, Options options, std::shared_ptr<Communicator> comm,
      OssOptions oss_options = {})
      : ShardedOptimizer(std::move(groups), defaults_of(options), factory(options), std::move(comm), oss_options,
                         step_cost()) {}

 private:
  static std::vector<torch::optim::OptimizerParamGroup> one_group(std::vector<at::Tensor> parameters) {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::move(parameters));
    return groups;
  }
  // Returns LocalOptimizer::step_cost (Muon has one), or null if the class has none.
  static StepCost step_cost() {
    if constexpr (requires { LocalOptimizer::step_cost; }) {
      return &LocalOptimizer::step_cost;
    } else {
      return nullptr;
    }
  }
  template <class Options>
  static Factory factory(const Options& options) {
    return [options](Groups groups) { return std::make_unique<LocalOptimizer>(std::move(groups), options); };
  }
  template <class Options>
  static std::unique_ptr<torch::optim::OptimizerOptions> defaults_of(const Options& options) {
    return factory(options)(one_group({}))->defaults().clone();
  }
};

}  // namespace tessera
