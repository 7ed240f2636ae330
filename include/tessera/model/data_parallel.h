#pragma once

#include <torch/nn/module.h>
#include <torch/ordered_dict.h>
#include <cstdint>

#include <string>

#include <tessera/model/grad_norm.h>
#include <tessera/model/model_shards.h>
#include <tessera/scope.h>

namespace tessera {

// What a wrapper holds on this rank, in bytes of tensors. FlatLayout predicts each figure.
struct MemoryReport {
  int64_t shard_bytes = 0;           // this rank's part of the parameters
  int64_t grad_bytes = 0;            // its part of the gradients, with memory that is kept for the next ones
  int64_t gathered_bytes = 0;        // full parameters of the units gathered or being gathered now
  int64_t peak_gathered_bytes = 0;   // the most of that at one time
  int64_t secondary_bytes = 0;       // parts of gathered ones that are kept for backward (hybrid sharding) now
  int64_t peak_secondary_bytes = 0;  // the most of that at one time
  int64_t bucket_bytes = 0;          // full gradients waiting for, or in, their reduce-scatter now
  int64_t peak_bucket_bytes = 0;     // the most of that at one time
  int64_t largest_unit_bytes = 0;    // full parameters of the largest unit
  int64_t unsharded_bytes = 0;       // the parameters of the whole model
  int64_t staging_bytes = 0;         // with offload: shards on their way to the device or from it, now
  int64_t peak_staging_bytes = 0;    // the most of that at one time

  // All of the above by where it lies; what is page-locked is counted in host_bytes, too.
  int64_t device_bytes = 0;
  int64_t host_bytes = 0;
  int64_t pinned_bytes = 0;
  int64_t disk_bytes = 0;
};

namespace internal {
class BackwardPass;
}

// Those of the module's buffers that are defined, under each of their names.
torch::OrderedDict<std::string, at::Tensor> defined_buffers(const torch::nn::Module& module);

// What a loop asks of a wrapped module beside forward(), whatever the wrapper shards.
class DataParallel : public ModelShards {
 public:
  // While the scope lives, backward adds up this rank's own gradients, of all parameters, in full, which takes their
  // memory; the next backward outside it reduces the sum. (Without it, each backward reduces, and the averages add
  // up.) Open, or not, in forward and backward alike, on all ranks. Throws std::logic_error inside a backward pass.
  Scope no_sync();

  // From the next backward on, sums of gradients over ranks are divided by this instead of the number of ranks (FSDP2's
  // set_gradient_divide_factor): the number of tokens of all ranks, say, where losses are sums over tokens. The same on
  // all ranks. Throws std::invalid_argument unless it is above 0.
  void set_gradient_divide_factor(double factor);

  // The same by the sum of `own` over the ranks, which it returns: for losses that are sums over tokens, `own` is how
  // many tokens count in this rank's part of the step, all micro-batches together, before the first backward of the
  // step. The gradients are then those of the mean over all tokens, wherever they are. Collective: one small
  // all-reduce. Throws std::invalid_argument, on all ranks, for a negative number on any and a sum of 0.
  int64_t divide_gradients_by_sum(int64_t own);

  // Scales the gradients so that their norm over all parameters and ranks is at most max_norm, as
  // torch::nn::utils::clip_grad_norm_ does, and returns the norm before. norm_type may be infinity. Between backward
  // and step. Collective, unless every rank has all gradients (DistributedDataParallel). Throws std::invalid_argument
  // for max_norm < 0 or norm_type <= 0; std::runtime_error if error_if_nonfinite and the norm is not finite;
  // std::logic_error where gradients are not ready for a step.
  double clip_grad_norm_(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false) {
    return clip_grad_norm_on_device_(max_norm, norm_type, error_if_nonfinite);
  }
  // The same without waiting for a device to compute the norm.
  virtual GradNorm clip_grad_norm_on_device_(double max_norm, double norm_type = 2.0,
                                             bool error_if_nonfinite = false) = 0;

  // Bytes that the wrapper holds now, and at most since the last reset_peak_memory(). Not collective.
  virtual MemoryReport memory() const = 0;
  // Starts the peaks of memory() again from what is held now.
  virtual void reset_peak_memory() = 0;

 private:
  virtual internal::BackwardPass& backward_pass() const = 0;
};

}  // namespace tessera
