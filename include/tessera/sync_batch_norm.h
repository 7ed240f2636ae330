#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <memory>

#include <tessera/communicator.h>

namespace tessera {

// torch.nn.SyncBatchNorm. Covers torch::nn::BatchNorm1d, 2d and 3d. Training uses the mean and the variance over the
// batches of all ranks. Input is [N, C] or [N, C, ...]; N may differ over ranks, and be 0. Statistics are added in
// double, in rank order, so that all ranks have equal ones. The names and the state are BatchNorm's.
//
// Works under any wrapper: each rank computes its part of the gradient, which the wrapper averages. In training,
// forward and backward are collective: each exchanges about 2 C numbers, in a separate group. eval() and no_grad behave
// like BatchNorm. Without running statistics, eval() uses those of the rank's own batch. Throws std::invalid_argument
// for inputs of other shapes, and for a batch of fewer than 2 values a channel over all ranks. Throws std::logic_error
// for second derivatives.
class SyncBatchNormImpl : public torch::nn::BatchNormImplBase<2, SyncBatchNormImpl> {
 public:
  // Makes a group for this layer. Collective.
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& norm, Communicator& comm)
      : SyncBatchNormImpl(norm, comm.split_by([](int) { return 0; })) {}
  // Uses a group that other layers share. Not collective.
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& norm, std::shared_ptr<Communicator> group)
      : BatchNormImplBase(norm), group_(std::move(group)) {}

  // [N, C] or [N, C, ...] -> the same shape. Collective in training.
  at::Tensor forward(const at::Tensor& input);

 protected:
  void _check_input_dim(const at::Tensor& input) override;

 private:
  std::shared_ptr<Communicator> group_;
};
TORCH_MODULE(SyncBatchNorm);

// Makes each BatchNorm1d, 2d and 3d in `module` (at any depth, and `module` itself) train with the statistics of all
// ranks, as SyncBatchNorm does. Returns the number of these layers. Modules, parameters and buffers keep their place
// and type. Only the member `running_mean` (`weight`, without statistics) becomes a read-only stand-in of the
// registered tensor. With it, at::batch_norm in torch's forward() computes over all ranks. torch's forward() still
// throws if a rank's input has one value a channel. clone() of a layer makes an ordinary BatchNorm.
//
// Must be called after values are initialized and before wrapping. Skips converted layers. Does not change direct calls
// of at::batch_norm() and batch norms of exported graphs, because these are no modules. Collective. Throws
// std::invalid_argument, with nothing changed, for layers with neither running statistics nor weights. The error names
// these layers; declare them SyncBatchNorm.
int convert_sync_batch_norm(torch::nn::Module& module, Communicator& comm);

}  // namespace tessera
