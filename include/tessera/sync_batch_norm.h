#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <memory>

#include <tessera/communicator.h>

namespace tessera {

// Batch normalization over all ranks, in place of BatchNorm1d, 2d and 3d (torch.nn.SyncBatchNorm). Training uses the
// mean and variance of all ranks' batches. Input is [N, C] or [N, C, ...]; N may differ over ranks, and be 0. Sums are
// computed in double, in rank order, so that all ranks have equal statistics. Names and state are those of BatchNorm.
//
// Works under any wrapper: each rank computes its part of the gradient, which the wrapper averages. In training mode,
// forward and backward are collective over a separate group. Forward all-gathers about 2 C numbers, and backward
// all-reduces 2 C numbers. In eval mode, the layer behaves like BatchNorm: without running statistics, it uses the
// rank's own batch. Throws std::invalid_argument for inputs of other shapes, and if all batches together have fewer
// than 2 values a channel. Throws std::logic_error for second derivatives.
class SyncBatchNormImpl : public torch::nn::BatchNormImplBase<2, SyncBatchNormImpl> {
 public:
  // Makes a new group for this layer. Collective.
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
// ranks, like SyncBatchNorm. Returns the number of converted layers. Modules, parameters and buffers keep their place
// and type. Only the member `running_mean` (or `weight`, if there is none) becomes a read-only stand-in of the
// registered tensor. The stand-in makes at::batch_norm in torch's forward() compute over all ranks. That forward()
// still throws if a rank's input has one value a channel. clone() of a layer makes an ordinary BatchNorm.
//
// Must be called after values are initialized and before wrapping. Skips converted layers. Does not change direct calls
// of at::batch_norm() or batch norms of exported graphs, because these are not modules. Collective. Throws
// std::invalid_argument, with nothing changed, if layers have neither running statistics nor weights, or are not owned
// by a std::shared_ptr. The error names these layers, which the program must declare as SyncBatchNorm instead.
int convert_sync_batch_norm(torch::nn::Module& module, Communicator& comm);

}  // namespace tessera
