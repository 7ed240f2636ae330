#pragma once

#include <memory>
#include <utility>

#include <tessera/detail/replicated_module.h>

namespace tessera {

// The dtype of gradients on the wire. kNone: the gradients' own. With the other values, gradients are rounded, added in
// fp32, and rounded again.
enum class GradientCompression { kNone, kFp16, kBf16 };

// Options of DistributedDataParallel, mostly named after the arguments of the class in torch.nn.parallel.
struct DdpOptions {
  // Upper limit of a bucket's bytes (PyTorch's bucket_cap_mb). Buckets are reduced in backward, last layers first. The
  // first bucket has a lower limit, so that communication starts early. On CPUs, without compression and
  // backend_all_reduce, gradients of 2 MiB or more are reduced alone, in autograd's memory. This memory becomes `.grad`
  // unless another tensor shares it.
  int64_t bucket_bytes = int64_t{25} << 20;
  int64_t first_bucket_bytes = int64_t{1} << 20;

  // If only some ranks use a parameter, missing gradients count as zero. true: a parameter that no rank used keeps its
  // earlier `.grad`. false: such a parameter makes the next forward throw std::runtime_error, unless static_graph is
  // set.
  bool find_unused_parameters = false;

  // true: gradients that share a bucket are views of the bucket, which saves copies and their memory.
  bool gradient_as_bucket_view = true;

  // true: the caller guarantees that every backward has gradients for the same parameters. Ranks then exchange and
  // compare the sets of used parameters in the first two backwards, but not in later ones.
  bool static_graph = false;

  // true: after a training forward outside no_sync(), the next forward first sends rank 0's buffers to all ranks.
  bool broadcast_buffers = true;
  bool sync_module_states = true;  // true: rank 0 sends its parameters and buffers; false: they must be equal
  GradientCompression compression = GradientCompression::kNone;  // the wire format of gradients

  // For debugging. N > 0: compares all ranks' parameters in every N-th training forward. Throws std::runtime_error with
  // the first difference. 0: never, unless the environment variable TESSERA_DEBUG is replicas (N = 100) or replicas:N.
  int64_t compare_replicas_every = 0;

  // true: uses the backend's all-reduce, with any order of additions. false: uses Tessera's, which adds in rank order.
  // On CPUs, true adds a barrier before each bucket to compare its size on all ranks. The barrier prevents overlap with
  // backward.
  bool backend_all_reduce = false;

  // A gradient that has its own bucket and at least this many bytes is reduced from autograd's memory, without a copy.
  // Only for groups that support this (gloo).
  int64_t zero_copy_bytes = int64_t{256} << 10;
};

namespace internal {

// The part of the wrapper that does not depend on the module's type.
class DdpModule : public ReplicatedModule {
 public:
  // Like torch::nn::utils::clip_grad_norm_(). Not collective, because every rank has all gradients. On a device, does
  // not block the host unless error_if_nonfinite is set.
  GradNorm clip_grad_norm_on_device_(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false) override;

 protected:
  DdpModule(torch::nn::Module& module, std::shared_ptr<Communicator> comm, const DdpOptions& options);
};

}  // namespace internal

// Data parallelism without sharding (Li et al., "PyTorch Distributed", 2020; torch's DistributedDataParallel). Every
// rank holds all parameters and, after backward, all gradients averaged over the ranks.
//
//   tessera::DistributedDataParallel ddp(model, comm);
//   torch::optim::SGD optimizer(ddp.parameters(), 0.1);
//   torch::mse_loss(ddp(x), y).backward();  // also reduces buckets
//   optimizer.step();
//
// `Holder` is a torch::nn module holder or a std::shared_ptr to a module. Train through the wrapper's forward, not the
// module's. With OSS as the optimizer this is ZeRO stage 1.
template <class Holder>
class DistributedDataParallel : public internal::DdpModule {
 public:
  // Collective. If the model or the options differ between ranks, throws std::invalid_argument on every rank, with the
  // name of the first difference.
  DistributedDataParallel(Holder module, std::shared_ptr<Communicator> comm, DdpOptions options = {})
      : internal::DdpModule(internal::module_in_holder(module), std::move(comm), options), module_(std::move(module)) {}

  // Returns module->forward(args...). Collective if it broadcasts buffers or compares replicas. Throws std::logic_error
  // if a parameter was added or converted after wrapping, or changed in forward. Throws std::runtime_error if no rank
  // has used a parameter since the last forward (see find_unused_parameters). Errors name the parameter.
  template <class... Args>
  auto forward(Args&&... args) {
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
