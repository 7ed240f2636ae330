#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/ordered_dict.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <tessera/ddp.h>
#include <tessera/fsdp.h>
#include <tessera/optim/adafactor.h>
#include <tessera/optim/adamw_8bit.h>
#include <tessera/optim/lbfgs.h>
#include <tessera/optim/lion.h>
#include <tessera/optim/muon.h>
#include <tessera/optim/schedule_free.h>
#include <tessera/options/fsdp_options.h>
#include <tessera/oss.h>
#include <tessera/sdp.h>

namespace tessera {

namespace internal {
// Returns the parameters of a module and its submodules, each once, under its first name.
torch::OrderedDict<std::string, at::Tensor> parameters_by_name(const torch::nn::Module& module);
}  // namespace internal

// Options of zero(): the stage, and the options of each wrapper. Must be equal on all ranks.
struct ZeroOptions {
  // Parameters by name, as the module registers them.
  using Parameters = torch::OrderedDict<std::string, at::Tensor>;
  // Groups of parameters, each with its own options, as the constructors of torch's optimizers accept them.
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  // The part of the training state that is sharded. 0: none. 1: optimizer state. 2: also gradients. 3: also parameters.
  int stage = 2;
  // Returns the optimizer's groups for the named parameters (in stage 3, shards). Empty: one group of all parameters.
  std::function<Groups(const Parameters&)> groups{};
  // Options of the wrappers and of OSS: ddp in stages 0 and 1, oss in 1 and 2, sdp in 2, fsdp in 3.
  DdpOptions ddp{};
  OssOptions oss{};
  SdpOptions sdp{};
  FsdpOptions fsdp{};

  // Returns groups(parameters), or one group of all parameters if `groups` is empty.
  Groups groups_of(const Parameters& parameters) const {
    return groups ? groups(parameters) : Groups(1, torch::optim::OptimizerParamGroup(parameters.values()));
  }
  // Returns the parameters of a module and its submodules, each once.
  static Parameters parameters_of(const torch::nn::Module& module) { return internal::parameters_by_name(module); }
};

// These overloads map each options type to its optimizer type. Declared only for decltype(); not defined.
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

// Throws std::invalid_argument if Optimizer is torch's own L-BFGS.
template <class Optimizer>
void refuse_line_searches_of_one_rank() {
  if constexpr (std::is_base_of_v<torch::optim::LBFGS, Optimizer>)
    throw std::invalid_argument(
        "zero<torch::optim::LBFGS>: its line searches follow this rank's loss, and its inner products this rank's "
        "part, so ranks go different ways; use tessera::LbfgsOptions");
}

namespace internal {

// Holds the wrapper of a stage that is chosen at run time. Empty until make() is called.
template <class Holder>
class StageWrapper {
 public:
  // Constructs the wrapper that matches the type of `options`.
  void make(const Holder& module, std::shared_ptr<Communicator> comm, const DdpOptions& options) {
    wrapper_.template emplace<Ddp>(module, std::move(comm), options);
  }
  void make(const Holder& module, ShardedOptimizer& optimizer, std::shared_ptr<Communicator> comm,
            const SdpOptions& options) {
    wrapper_.template emplace<Sdp>(module, optimizer, std::move(comm), options);
  }
  void make(const Holder& module, std::shared_ptr<Communicator> comm, const FsdpOptions& options) {
    wrapper_.template emplace<Fsdp>(module, std::move(comm), options);
  }

  // Returns act(wrapper). The result must have the same type for all wrappers. make() must have been called.
  template <class Act>
  auto with(Act act) {
    if (auto* ddp = std::get_if<Ddp>(&wrapper_)) return act(*ddp);
    if (auto* sdp = std::get_if<Sdp>(&wrapper_)) return act(*sdp);
    return act(std::get<Fsdp>(wrapper_));
  }
  // Returns the wrapper through the base class of all wrappers.
  DataParallel& any() {
    return *with([](auto& wrapper) -> DataParallel* { return &wrapper; });
  }
  const DataParallel& any() const { return const_cast<StageWrapper*>(this)->any(); }

 private:
  using Ddp = DistributedDataParallel<Holder>;
  using Sdp = ShardedDataParallel<Holder>;
  using Fsdp = FullyShardedDataParallel<Holder>;
  std::variant<std::monostate, Ddp, Sdp, Fsdp> wrapper_;
};

}  // namespace internal

// A module and its optimizer in one of the ZeRO stages, behind one interface. Created by zero(). Each function calls
// the stage's wrapper or optimizer, whose header states the contract. parameters() returns the optimizer's parameters:
// whole parameters, or this rank's shards in stage 3.
template <class Holder, class Optimizer>
class Zero : public ModelShards {
 public:
  // Programs should call zero(), which documents the arguments.
  template <class Options>
  Zero(Holder module, const Options& options, std::shared_ptr<Communicator> comm, const ZeroOptions& zero)
      : stage_(zero.stage), module_(std::move(module)) {
    refuse_line_searches_of_one_rank<Optimizer>();
    switch (stage_) {
      case 0:
        wrapper_.make(module_, comm, zero.ddp);
        optimizer_ = make_optimizer(zero.groups_of(named_parameters()), options);
        break;
      case 1:
        wrapper_.make(module_, comm, zero.ddp);
        optimizer_ = std::make_unique<OSS<Optimizer>>(zero.groups_of(named_parameters()), options, comm, zero.oss);
        break;
      case 2: {  // creates the optimizer first: the wrapper reads the owners from it
        auto groups = zero.groups_of(ZeroOptions::parameters_of(internal::module_in_holder(module_)));
        auto sharded = std::make_unique<OSS<Optimizer>>(std::move(groups), options, comm, zero.oss);
        wrapper_.make(module_, *sharded, comm, zero.sdp);
        optimizer_ = std::move(sharded);
        break;
      }
      case 3:
        wrapper_.make(module_, comm, zero.fsdp);
        optimizer_ = make_optimizer(zero.groups_of(named_parameters()), options);
        break;
      default:
        throw std::invalid_argument("ZeroOptions::stage is " + std::to_string(stage_) + ", expected 0 to 3");
    }
  }

  int stage() const { return stage_; }  // ZeroOptions::stage

  // Returns the result of module->forward(args...).
  template <class... Args>
  auto forward(Args&&... args) {
    using Output = std::decay_t<decltype(module_->forward(std::forward<Args>(args)...))>;
    return wrapper_.with([&](auto& wrapper) -> Output { return wrapper.forward(std::forward<Args>(args)...); });
  }
  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  // Takes one step of the optimizer. Returns the loss of `closure`, if any. All ranks must call this function after
  // loss.backward(). Collective in stages 1 and 2, and for optimizers that need whole parameters (Muon).
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) {
    return optimizer_->step(std::move(closure));
  }
  // Clips the gradients by their norm. Returns the norm before clipping. Collective, except in stage 0.
  double clip_grad_norm_(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false) {
    if (auto* sharded = dynamic_cast<ShardedOptimizer*>(optimizer_.get()); sharded != nullptr && stage_ == 1)
      return sharded->clip_grad_norm_(max_norm, norm_type, error_if_nonfinite);
    return wrapper_.any().clip_grad_norm_(max_norm, norm_type, error_if_nonfinite);
  }
  // Sets the divisor of summed gradients (default: the number of ranks). Takes effect in the next backward.
  void set_gradient_divide_factor(double factor) { wrapper_.any().set_gradient_divide_factor(factor); }
  // Sets the divisor to the sum of `own` over the ranks. See DataParallel.
  int64_t divide_gradients_by_sum(int64_t own) { return wrapper_.any().divide_gradients_by_sum(own); }
  // While the scope exists, backward accumulates local gradients and does not reduce them.
  ScopeExit no_sync() { return wrapper_.any().no_sync(); }

  // Returns copies of the full parameters and buffers, by the module's names. Collective in stage 3.
  ZeroOptions::Parameters full_state_dict() {
    return wrapper_.with([](auto& wrapper) { return wrapper.full_state_dict(); });
  }
  MemoryReport memory() const { return wrapper_.any().memory(); }  // bytes of the wrapper's tensors on this rank

  // Returns the optimizer, for learning rates, schedulers, and save_checkpoint(dir, {model, optimizer}).
  torch::optim::Optimizer& optimizer() { return *optimizer_; }
  // Returns the stage's wrapper, for calls that Zero lacks. Its type is DistributedDataParallel<Holder> in stages 0 and
  // 1, ShardedDataParallel<Holder> in stage 2, and FullyShardedDataParallel<Holder> in stage 3.
  DataParallel& wrapper() { return wrapper_.any(); }
  Holder module() const { return module_; }  // the wrapped module, for example for module()->eval()

  const std::shared_ptr<Communicator>& comm() const override { return wrapper_.any().comm(); }
  std::vector<NamedShard> named_shards() const override { return wrapper_.any().named_shards(); }
  std::vector<NamedShard> shards_to_save() const override { return wrapper_.any().shards_to_save(); }
  std::vector<HeldPart> held_by(int rank) const override { return wrapper_.any().held_by(rank); }
  ZeroOptions::Parameters named_buffers() const override { return wrapper_.any().named_buffers(); }

 private:
  // Constructs the optimizer. Passes the wrapper to optimizers that need whole parameters.
  template <class Options>
  std::unique_ptr<Optimizer> make_optimizer(ZeroOptions::Groups groups, const Options& options) const {
    if constexpr (std::is_constructible_v<Optimizer, const ModelShards&, ZeroOptions::Groups, Options>)
      return std::make_unique<Optimizer>(wrapper_.any(), std::move(groups), options);
    else
      return std::make_unique<Optimizer>(std::move(groups), options);
  }

  const int stage_;
  Holder module_;
  internal::StageWrapper<Holder> wrapper_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

// Wraps a module and creates its optimizer for the ZeRO stage in `zero_options`. The rest of a program is equal for all
// stages.
//
//   auto model = tessera::zero(Gpt(config), torch::optim::AdamWOptions(3e-4), comm, {.stage = 3});
//   loss_of(model(tokens)).backward();
//   model.step();
//   model.zero_grad();
//
// The type of `options` selects the optimizer, unless the caller names one: zero<MyAdam>(...). If the optimizer is
// elementwise and of torch::optim, all stages produce bit-equal fp32 and fp64 parameters at the same world size. With
// other optimizers or 16-bit parameters, stages agree up to rounding. Collective. Throws std::invalid_argument unless
// `stage` is 0 to 3, and the errors of the stage's wrappers.
template <class Optimizer = void, class Holder, class Options>
auto zero(Holder module, const Options& options, std::shared_ptr<Communicator> comm,
          const ZeroOptions& zero_options = {}) {
  if constexpr (std::is_void_v<Optimizer>) {
    return Zero<Holder, decltype(optimizer_of(options))>(std::move(module), options, std::move(comm), zero_options);
  } else {
    return Zero<Holder, Optimizer>(std::move(module), options, std::move(comm), zero_options);
  }
}

}  // namespace tessera
