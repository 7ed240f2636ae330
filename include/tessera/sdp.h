#pragma once

#include <c10/core/GradMode.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/detail/replicated_module.h>
#include <tessera/options/wire_format.h>
#include <tessera/sharded_optimizer.h>

namespace tessera {

// Options of ShardedDataParallel, mostly with the names of FairScale's arguments.
struct SdpOptions {
  // Gradients of less than 1 MiB share buckets of up to this many bytes. Each larger gradient has its own bucket. 0:
  // every gradient has its own bucket. Like FairScale's reduce_buffer_size, which counts elements instead of bytes.
  int64_t reduce_bucket_bytes = int64_t{32} << 20;

  // The dtype of gradients on the wire, for example kHalf or kBFloat16. Gradients are then rounded, added in fp32, and
  // rounded again. Empty: the gradients' own dtype.
  std::optional<at::ScalarType> reduce_dtype{};

  // kInt8Blocks: each rank rounds its gradients to 8 bits once, and a parameter's owner adds all ranks' gradients in
  // fp32 (see WireFormat). Must not be combined with reduce_dtype.
  WireFormat wire = WireFormat::kDtype;

  // true: after a training forward outside no_sync(), the next forward first sends rank 0's buffers to all ranks.
  bool broadcast_buffers = true;
  bool sync_models_at_startup = true;  // true: rank 0 sends its parameters and buffers; false: they must be equal

  // For debugging. N > 0: compares all ranks' parameters in every N-th training forward outside no_sync(). Throws
  // std::runtime_error with the name of the first difference. 0: never, unless TESSERA_DEBUG is replicas (N = 100) or
  // replicas:N. Always off if OssOptions::broadcast_dtype is set, because a parameter's owner then holds exact values,
  // and all other ranks rounded values.
  int64_t compare_replicas_every = 0;
  // A gradient that has its own bucket and at least this many bytes is reduced from autograd's memory, without a copy
  // into the bucket. Only for groups that support this (gloo).
  int64_t zero_copy_bytes = int64_t{256} << 10;
};

namespace internal {

// The part of the wrapper that does not depend on the module's type.
class SdpModule : public ReplicatedModule {
 public:
  // Updates the set of reduced gradients after changes of requires_grad. Each forward() calls this function.
  void refresh_trainable();

  // Like torch::nn::utils::clip_grad_norm_(), over the module's parameters. Collective. Must be called after backward.
  // Throws like ShardedOptimizer::clip_grad_norm_(), and std::logic_error if an optimizer no longer exists.
  GradNorm clip_grad_norm_on_device_(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false) override;

  // Returns the memory of the wrapper, and the host memory of the optimizers that still exist.
  MemoryReport memory() const override;

 protected:
  SdpModule(torch::nn::Module& module, std::vector<ShardedOptimizer*> optimizers, std::shared_ptr<Communicator> comm,
            const SdpOptions& options);

  // Throws std::logic_error if an optimizer no longer exists. The error names one of that optimizer's parameters.
  void require_optimizers() const;

 private:
  struct Reference {
    ShardedOptimizer* optimizer;
    std::weak_ptr<const void> lifetime;  // expires with the optimizer
    std::string first_parameter;         // name, in the module, of the optimizer's first parameter; for errors
  };
  static std::vector<Reference> references_to(const std::vector<ShardedOptimizer*>& optimizers,
                                              const std::vector<PlannedParameter>& parameters,
                                              const Communicator& comm);
  int owner_of(const PlannedParameter& parameter) const;

  const std::vector<Reference> optimizers_;
};

}  // namespace internal

// Gradient sharding, ZeRO stage 2 (Rajbhandari et al., 2020; FairScale's ShardedDataParallel). During backward, each
// gradient is reduced to the rank whose optimizer owns the parameter, and freed on the other ranks.
//
//   tessera::OSS<torch::optim::Adam> optimizer(model->parameters(), torch::optim::AdamOptions(1e-3), comm);
//   tessera::ShardedDataParallel sdp(model, optimizer, comm);
//   torch::mse_loss(sdp(x), y).backward();  // .grad() is defined for the parameters that this rank owns
//   optimizer.step();
//
// Several optimizers of one model are passed as pointers: {&first, &second}. They must exist as long as the wrapper is
// used; otherwise a training forward throws std::logic_error. If this rank's gradients are not averages, an optimizer's
// step() throws std::logic_error. This occurs if the last backward failed or ran under no_sync(). `Holder` is a
// torch::nn module holder or a std::shared_ptr to a module. Training must call the wrapper's forward. The module's own
// forward does not broadcast buffers, and ignores changes of requires_grad until refresh_trainable() is called.
template <class Holder>
class ShardedDataParallel : public internal::SdpModule {
 public:
  // Collective. If the model or options differ between ranks, throws std::invalid_argument with the name of the first
  // difference. Also throws it if a trainable parameter is in no optimizer or in two, or if an optimizer has another
  // communicator.
  ShardedDataParallel(Holder module, ShardedOptimizer& optimizer, std::shared_ptr<Communicator> comm,
                      SdpOptions options = {})
      : ShardedDataParallel(std::move(module), std::vector<ShardedOptimizer*>{&optimizer}, std::move(comm), options) {}
  ShardedDataParallel(Holder module, std::vector<ShardedOptimizer*> optimizers, std::shared_ptr<Communicator> comm,
                      SdpOptions options = {})
      : internal::SdpModule(internal::module_in_holder(module), std::move(optimizers), std::move(comm), options),
        module_(std::move(module)) {}

  // Returns the result of module->forward(args...). Collective if it broadcasts buffers or compares replicas. If a
  // parameter that is in no optimizer has become trainable, throws like the constructor.
  template <class... Args>
  auto forward(Args&&... args) {
    if (c10::GradMode::is_enabled()) require_optimizers();
    return run_forward(module_, std::forward<Args>(args)...);
  }
  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  Holder module() const { return module_; }  // the wrapped module, for example for module()->eval()

 private:
  Holder module_;
};

}  // namespace tessera
