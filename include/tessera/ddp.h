#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <tessera/detail/replicated_module.h>

namespace tessera {

// The wire format of gradients: their own dtype, or rounded to 16 bits (added in fp32, rounded again).
enum class GradientCompression { kNone, kFp16, kBf16 };

// Options with the names of torch.nn.parallel.DistributedDataParallel's arguments.
struct DdpOptions {
  // The size of buckets; PyTorch's bucket_cap_mb. Buckets are reduced during backward, those of the last layers first.
  // The first is smaller, so that sending begins early. On CPUs a gradient of 2 MiB or more is a bucket by itself: it
  // is reduced in autograd's memory, which becomes `.grad`, unless another tensor shares it.
  int64_t bucket_bytes = int64_t{25} << 20;
  int64_t first_bucket_bytes = int64_t{1} << 20;

  // The gradient of a parameter that this rank's loss does not depend on counts as zero. true: a parameter that no rank
  // used keeps its gradient. false: such a parameter is an error in the next forward.
  bool find_unused_parameters = false;

  // true: gradients that share a bucket are views of it, which saves a copy and its memory.
  bool gradient_as_bucket_view = true;

  // The caller promises that every iteration has gradients for the same parameters. Ranks then exchange the set of used
  // parameters, and check that they agree, after the first two backwards only.
  bool static_graph = false;

  bool broadcast_buffers = true;   // from rank 0, before each forward that follows a training forward
  bool sync_module_states = true;  // parameters and buffers from rank 0 at construction
  GradientCompression compression = GradientCompression::kNone;  // the wire format of gradients

  // For debugging: compares the parameters of all ranks in every N-th forward that trains, and throws
  // std::runtime_error, naming the first that differs. 0: as set by TESSERA_DEBUG=replicas or replicas:N; else never.
  int64_t compare_replicas_every = 0;

  // true: the backend's own all-reduce, in its own order of additions. false: Tessera's, in rank order.
  bool backend_all_reduce = false;

  // Gradients of at least this many bytes that share no bucket are reduced from autograd's memory, without a copy.
  // Needs a group that supports this (gloo).
  int64_t zero_copy_bytes = int64_t{256} << 10;
};

namespace internal {

// The part of the wrapper that does not depend on the module's type.
class DdpModule : public ReplicatedModule {
 public:
  // torch::nn::utils::clip_grad_norm_. Not collective: every rank has all gradients. On a device it returns without
  // blocking, unless error_if_nonfinite is set.
  GradNorm clip_grad_norm_on_device_(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false) override;

 protected:
  DdpModule(torch::nn::Module& module, std::shared_ptr<Communicator> comm, const DdpOptions& options);
};

}  // namespace internal

// Data parallelism without sharding (Li et al., "PyTorch Distributed", 2020; torch's DistributedDataParallel):
// every rank holds all parameters, and after backward the gradients averaged over ranks.
//
//   tessera::DistributedDataParallel ddp(model, comm);
//   torch::optim::SGD optimizer(ddp.parameters(), 0.1);
//   torch::mse_loss(ddp(x), y).backward();  // reduces buckets meanwhile
//   optimizer.step();
//
// `Holder` is a torch::nn module holder or a std::shared_ptr to a module. Train through the wrapper's forward, not the
// module's. With OSS as the optimizer this is ZeRO stage 1.
template <class Holder>
class DistributedDataParallel : public internal::DdpModule {
 public:
  // Collective. Throws std::invalid_argument, on every rank and with the first difference by
  // name, if ranks differ in the model or the options.
  DistributedDataParallel(Holder module, std::shared_ptr<Communicator> comm, DdpOptions options = {})
      : internal::DdpModule(*module, std::move(comm), options), module_(std::move(module)) {}

  // Returns the result of module->forward(args...). Collective if buffers are broadcast. Throws std::logic_error,
  // naming the parameter, if one was added, converted, or changed in forward; std::runtime_error, naming it, if no rank
  // has used a parameter since the last forward, unless DdpOptions::find_unused_parameters or static_graph allows it.
  template <class... Args>
  auto forward(Args&&... args) {
    return run_forward(module_, std::forward<Args>(args)...);
  }
  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  // The wrapped module: module()->eval().
  Holder module() const { return module_; }

 private:
  Holder module_;
};

}  // namespace tessera
