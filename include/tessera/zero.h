#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <tessera/stage_wrapper.h>
#include <tessera/zero_options.h>

namespace tessera {

// A module and its optimizer in one of the ZeRO stages, behind one interface. Made by zero().
// Each call does what the wrapper of the stage does; see there for what is collective and throws. parameters() are what
// the optimizer was given: whole ones, or this rank's shards of them in stage 3.
template <class Holder, class Optimizer>
class Zero : public ModelShards {
 public:
  // For zero(), which says what Options are.
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
      case 2: {  // the optimizer first: the wrapper wants to know the owners
        auto groups = zero.groups_of(ZeroOptions::parameters_of(*module_));
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

  // What module->forward(args...) returns.
  template <class... Args>
  auto forward(Args&&... args) {
    using Output = std::decay_t<decltype(module_->forward(std::forward<Args>(args)...))>;
    return wrapper_.with([&](auto& wrapper) -> Output { return wrapper.forward(std::forward<Args>(args)...); });
  }
  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  // After loss.backward(): one step of the optimizer. Collective in stages 1 and 2, so call it on
  // all ranks alike.
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) {
    return optimizer_->step(std::move(closure));
  }
  // The norm before. Collective but in stage 0.
  double clip_grad_norm_(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false) {
    if (auto* sharded = dynamic_cast<ShardedOptimizer*>(optimizer_.get()); sharded != nullptr && stage_ == 1)
      return sharded->clip_grad_norm_(max_norm, norm_type, error_if_nonfinite);
    return wrapper_.any().clip_grad_norm_(max_norm, norm_type, error_if_nonfinite);
  }
  // What sums of gradients over ranks are divided by from the next backward on, instead of the number of ranks.
  void set_gradient_divide_factor(double factor) { wrapper_.any().set_gradient_divide_factor(factor); }
  // The same by the sum of `own` over the ranks: see DataParallel.
  int64_t divide_gradients_by_sum(int64_t own) { return wrapper_.any().divide_gradients_by_sum(own); }
  // While the scope lives, backward adds up gradients without reducing them.
  Scope no_sync() { return wrapper_.any().no_sync(); }

  // Whole, by the module's names, as copies. Collective.
  ZeroOptions::Parameters full_state_dict() {
    return wrapper_.with([](auto& wrapper) { return wrapper.full_state_dict(); });
  }
  // Bytes that the wrapper holds on this rank.
  MemoryReport memory() const { return wrapper_.any().memory(); }

  // For learning rates and schedulers, and beside this object for save_checkpoint().
  torch::optim::Optimizer& optimizer() { return *optimizer_; }
  // The module that was given: module()->eval().
  Holder module() const { return module_; }

  const std::shared_ptr<Communicator>& comm() const override { return wrapper_.any().comm(); }
  std::vector<NamedShard> named_shards() const override { return wrapper_.any().named_shards(); }
  std::vector<NamedShard> shards_to_save() const override { return wrapper_.any().shards_to_save(); }
  std::vector<HeldPart> held_by(int rank) const override { return wrapper_.any().held_by(rank); }
  ZeroOptions::Parameters named_buffers() const override { return wrapper_.any().named_buffers(); }

 private:
  // Optimizers that look at whole parameters are told of the wrapper.
  template <class Options>
  std::unique_ptr<Optimizer> make_optimizer(ZeroOptions::Groups groups, const Options& options) const {
    if constexpr (std::is_constructible_v<Optimizer, const ModelShards&, ZeroOptions::Groups, Options>)
      return std::make_unique<Optimizer>(wrapper_.any(), std::move(groups), options);
    else
      return std::make_unique<Optimizer>(std::move(groups), options);
  }

  const int stage_;
  Holder module_;
  StageWrapper<Holder> wrapper_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

// The module and an optimizer for it, wrapped for the stage: a program switches stage by one number.
//
//   auto model = tessera::zero(Gpt(config), torch::optim::AdamWOptions(3e-4), comm, {.stage = 3});
//   loss_of(model(tokens)).backward();
//   model.step();
//   model.zero_grad();
//
// The optimizer is the one that the options belong to, or the one named: zero<MyAdam>(...). At one world size all
// stages give the same parameters, bit for bit, with optimizers that work on each element by itself. Collective.
// Throws std::invalid_argument for a stage other than 0 to 3, and what the stage's wrappers throw.
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
