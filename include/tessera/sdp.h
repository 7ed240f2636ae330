#pragma once

#include <c10/core/GradMode.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/detail/replicated_module.h>
#include <tessera/options/wire_format.h>
#include <tessera/sharded_optimizer.h>

namespace tessera {

// As FairScale's ShardedDataParallel's arguments, whose names they have.
struct SdpOptions {
  // Gradients of less than 1 MiB travel together, up to this many elements at a time; 0: each by
  // itself. Larger ones always do.
  int64_t reduce_buffer_size = int64_t{1} << 23;

  // What gradients travel in, kHalf or kBFloat16 say (added in fp32, rounded again). Empty: as they are.
  std::optional<at::ScalarType> reduce_dtype;

  // kInt8Blocks: gradients travel in 8 bit, rounded once by each rank and added in fp32 by the owner (see Int8Blocks).
  WireFormat wire = WireFormat::kDtype;

  bool broadcast_buffers = true;       // before each forward that trains, from rank 0
  bool sync_models_at_startup = true;  // parameters and buffers from rank 0 at construction

  // For debugging: compares the parameters of all ranks in every N-th forward that trains, and throws
  // std::runtime_error, naming the first that differs. 0: TESSERA_DEBUG=replicas or replicas:N says, else never. Never
  // with OssOptions::broadcast_dtype, which rounds replicas.
  int64_t compare_replicas_every = 0;
  // Gradients of at least this many bytes are reduced from autograd's memory, without a copy into their bucket, where
  // the group can (gloo).
  int64_t zero_copy_bytes = int64_t{256} << 10;
};

// The part of the wrapper that does not depend on the module's type.
class SdpModule : public ReplicatedModule {
 public:
  // Looks which parameters require gradients now. Each forward does it too.
  void refresh_trainable();

  // torch::nn::utils::clip_grad_norm_ over the parameters of all optimizers. Collective; after
  // backward. Throws as ShardedOptimizer::clip_grad_norm_.
  GradNorm clip_grad_norm_on_device_(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false) override;

  // Also what the optimizers have in host memory.
  MemoryReport memory() const override;

 protected:
  SdpModule(torch::nn::Module& module, std::vector<ShardedOptimizer*> optimizers, std::shared_ptr<Communicator> comm,
            const SdpOptions& options);

  // Throws std::logic_error, naming a parameter of it, if one of the optimizers no longer exists.
  void require_optimizers() const;

 private:
  struct Reference {
    ShardedOptimizer* optimizer;
    std::weak_ptr<const void> lifetime;  // of the optimizer
    std::string first_parameter;         // of the module's that it has
  };
  static std::vector<Reference> references_to(const std::vector<ShardedOptimizer*>& optimizers,
                                              const std::vector<internal::PlannedParameter>& parameters,
                                              const Communicator& comm);
  int owner_of(const internal::PlannedParameter& parameter) const;

  const std::vector<Reference> optimizers_;
};

// Gradient sharding, ZeRO stage 2 (Rajbhandari et al., 2020; FairScale's ShardedDataParallel): each
// gradient is reduced to the one rank whose optimizer wants it, while backward goes on, and freed
// everywhere else.
//
//   tessera::OSS<torch::optim::Adam> optimizer(model->parameters(), torch::optim::AdamOptions(1e-3), comm);
//   tessera::ShardedDataParallel sdp(model, optimizer, comm);
//   torch::mse_loss(sdp(x), y).backward();  // .grad() is defined for the parameters owned here
//   optimizer.step();
//
// With several optimizers on one model give pointers to all of them: {&first, &second}. They must
// outlive the wrapper's use: forward() throws std::logic_error where one is gone. An optimizer's step() throws
// std::logic_error where this rank's gradients are not averages: after a backward under no_sync() alone, or one that
// failed. `Holder` is a torch::nn module holder or a std::shared_ptr to a module. Train through the wrapper; a forward
// that goes past it does not notice changes of requires_grad or exchange buffers.
template <class Holder>
class ShardedDataParallel : public SdpModule {
 public:
  // Collective. Throws std::invalid_argument if ranks differ in the model or the options (the
  // first difference, by name), and for a trainable parameter that no optimizer has, or two.
  ShardedDataParallel(Holder module, ShardedOptimizer& optimizer, std::shared_ptr<Communicator> comm,
                      SdpOptions options = {})
      : ShardedDataParallel(std::move(module), std::vector<ShardedOptimizer*>{&optimizer}, std::move(comm), options) {}
  ShardedDataParallel(Holder module, std::vector<ShardedOptimizer*> optimizers, std::shared_ptr<Communicator> comm,
                      SdpOptions options = {})
      : SdpModule(*module, std::move(optimizers), std::move(comm), options), module_(std::move(module)) {}

  // What module->forward(args...) returns. Collective if the module has buffers. Throws as the
  // constructor if a parameter has become trainable that no optimizer has.
  template <class... Args>
  auto forward(Args&&... args) {
    if (c10::GradMode::is_enabled()) require_optimizers();
    return run_forward(module_, std::forward<Args>(args)...);
  }
  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  // The module that was given: module()->eval().
  Holder module() const { return module_; }

 private:
  Holder module_;
};

}  // namespace tessera
