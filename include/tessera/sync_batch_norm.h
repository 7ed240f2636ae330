#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <memory>

#include <tessera/communicator.h>

namespace tessera {

// torch.nn.SyncBatchNorm: torch::nn::BatchNorm1d, 2d and 3d in one, with the mean and the variance of all ranks'
// batches together while it trains. Input [N, C] or [N, C, ...], ranks' N may differ, and be 0; statistics are added in
// double, in rank order, so all ranks have the same. The names and the state are BatchNorm's.
//
// Under any wrapper: what each rank computes is its part of the gradient, which the wrapper averages. In training
// forward is collective, and backward too: two small exchanges, of 2 C and 2 C numbers, in a group of its own. In
// eval(), and with no_grad in training, it does what BatchNorm does with such statistics; without running statistics
// eval() takes those of the rank's own batch. Throws std::invalid_argument for inputs of other shapes and a batch of
// fewer than 2 values a channel over all ranks, std::logic_error for second derivatives.
class SyncBatchNormImpl : public torch::nn::BatchNormImplBase<2, SyncBatchNormImpl> {
 public:
  // Collective.
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& norm, Communicator& comm)
      : SyncBatchNormImpl(norm, comm.split_by([](int) { return 0; })) {}
  // In a group that several share. Not collective.
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& norm, std::shared_ptr<Communicator> group)
      : BatchNormImplBase(norm), group_(std::move(group)) {}

  // [N, C] or [N, C, ...], of the same shape out. Collective in training.
  at::Tensor forward(const at::Tensor& input);

 protected:
  void _check_input_dim(const at::Tensor& input) override;

 private:
  std::shared_ptr<Communicator> group_;
};
TORCH_MODULE(SyncBatchNorm);

// Makes each BatchNorm1d, 2d and 3d in `module` (members of a type of yours, in Sequential or ModuleList, itself) train
// with the statistics of all ranks, as SyncBatchNorm does; returns how many. No module, parameter or buffer changes
// place or type: the member `running_mean` (`weight`, where no statistics are kept) stands for the registered tensor,
// read only from then on, and torch's forward(), which hands it to at::batch_norm, computes with all ranks. torch's
// forward() refuses an input of one value a channel on a rank. clone() of a layer makes an ordinary one.
//
// After values are initialized, before wrapping, once (those that are converted are passed over). Batch norms that a
// program's own code calls at::batch_norm() for, and those of exported graphs, are no modules and stay as they are.
// Collective. Throws std::invalid_argument, with nothing changed, that lists those by name that have neither running
// statistics nor weights: declare them SyncBatchNorm.
int convert_sync_batch_norm(torch::nn::Module& module, Communicator& comm);

}  // namespace tessera
