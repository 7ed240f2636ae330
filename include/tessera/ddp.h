#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <tessera/detail/replicated_module.h>

namespace tessera {

// What gradients travel in: as they are, or rounded to 16 bits (added in fp32, rounded again).
enum class GradientCompression { kNone, kFp16, kBf16 };

// As torch.nn.parallel.DistributedDataParallel's arguments, whose names they have.
struct DdpOptions {
  // Gradients travel in buckets of this many MiB, the last layers' first, while backward goes on;
  // the first bucket is smaller, so that sending begins early. On CPUs one of 2 MiB or more is a bucket by itself,
  // which is reduced where autograd left it and stays `.grad`, unless somebody else holds it.
  double bucket_cap_mb = 25;
  double first_bucket_mb = 1;

  // A parameter that the loss does not depend on, in this iteration and on this rank, counts as zero.
  // true: one that no rank used keeps its gradient as it was. false: such a parameter is an error in the next forward.
  bool find_unused_parameters = false;

  // true: gradients that share a bucket are views of it, which saves a copy and their memory once more.
  bool gradient_as_bucket_view = true;

  // The caller promises that every iteration has gradients for the same parameters: which ones, and that the ranks
  // reduce alike, is exchanged after the first two backwards only.
  bool static_graph = false;

  bool broadcast_buffers = true;   // before each forward that follows a reduced backward, from rank 0
  bool sync_module_states = true;  // parameters and buffers from rank 0 at construction
  GradientCompression compression = GradientCompression::kNone;  // what gradients travel in

  // For debugging: compares the parameters of all ranks in every N-th forward that trains, and throws
  // std::runtime_error, naming the first that differs. 0: TESSERA_DEBUG=replicas or replicas:N says, else never.
  int64_t compare_replicas_every = 0;

  // true: the backend's own all-reduce, whatever order it adds in; false: comm's, in rank order.
  bool backend_all_reduce = false;

  // Gradients of at least this many bytes are reduced from autograd's memory, without a copy into their bucket, where
  // the group can (gloo) and they share no bucket.
  int64_t zero_copy_bytes = int64_t{256} << 10;
};

// The part of the wrapper that does not depend on the module's type.
class DdpModule : public ReplicatedModule {
 public:
  // torch::nn::utils::clip_grad_norm_: every rank has all gradients, so nothing is exchanged. On a device the same
  // numbers, which the host does not wait for but with error_if_nonfinite.
  GradNorm clip_grad_norm_on_device_(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false) override;

 protected:
  DdpModule(torch::nn::Module& module, std::shared_ptr<Communicator> comm, const DdpOptions& options);
};

// Data parallelism without sharding (Li et al., "PyTorch Distributed", 2020; torch's DistributedDataParallel):
// every rank holds everything, and backward leaves each with the gradients averaged over ranks.
//
//   tessera::DistributedDataParallel ddp(model, comm);
//   torch::optim::SGD optimizer(ddp.parameters(), 0.1);
//   torch::mse_loss(ddp(x), y).backward();  // buckets travel meanwhile
//   optimizer.step();
//
// `Holder` is a torch::nn module holder or a std::shared_ptr to a module. Train through the wrapper:
// a forward that goes past it is not prepared for. With OSS as the optimizer this is ZeRO stage 1.
template <class Holder>
class DistributedDataParallel : public DdpModule {
 public:
  // Collective. Throws std::invalid_argument, on every rank and with the first difference by
  // name, if ranks differ in the model or the options.
  DistributedDataParallel(Holder module, std::shared_ptr<Communicator> comm, DdpOptions options = {})
      : DdpModule(*module, std::move(comm), options), module_(std::move(module)) {}

  // What module->forward(args...) returns. Collective where buffers move. Throws std::logic_error, naming the
  // parameter, for what has been done to the module that cannot be trained: a parameter added, converted, or changed in
  // forward; std::runtime_error, naming it, for one that no rank used since the last forward, unless
  // DdpOptions::find_unused_parameters or static_graph allows it.
  template <class... Args>
  auto forward(Args&&... args) {
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
