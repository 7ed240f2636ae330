#pragma once

#include <torch/nn/module.h>
#include <torch/ordered_dict.h>
#include <cstdint>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/model/grad_norm.h>
#include <tessera/model/model_shards.h>
#include <tessera/scope_exit.h>

namespace torch::optim {
class Optimizer;
}

namespace tessera {

// Bytes of tensors that a wrapper holds on this rank. FlatLayout predicts each number.
struct MemoryReport {
  int64_t shard_bytes = 0;           // this rank's part of the parameters
  int64_t grad_bytes = 0;            // its part of the gradients
  int64_t gathered_bytes = 0;        // full parameters of the units gathered or being gathered now
  int64_t peak_gathered_bytes = 0;   // the peak of gathered_bytes
  int64_t secondary_bytes = 0;       // parts of gathered parameters kept for backward (hybrid sharding), now
  int64_t peak_secondary_bytes = 0;  // the peak of secondary_bytes
  int64_t bucket_bytes = 0;          // gradients in buckets now, waiting or being reduced
  int64_t peak_bucket_bytes = 0;     // the peak of bucket_bytes
  int64_t largest_unit_bytes = 0;    // full parameters of the largest unit
  int64_t unsharded_bytes = 0;       // the parameters of the whole model
  int64_t staging_bytes = 0;         // with offload: shards that are copied to or from the device, now
  int64_t peak_staging_bytes = 0;    // the peak of staging_bytes

  // The sum of the current numbers, by place. host_bytes includes page-locked memory.
  int64_t device_bytes = 0;
  int64_t host_bytes = 0;
  int64_t pinned_bytes = 0;
  int64_t disk_bytes = 0;
};

namespace internal {
class BackwardPass;
}

// The defined buffers of a module, under each of their names.
torch::OrderedDict<std::string, at::Tensor> defined_buffers(const torch::nn::Module& module);

// A wrapped module, as a training loop uses it beside forward().
class DataParallel : public ModelShards {
 public:
  // While the scope exists, backward adds up this rank's own gradients, of all parameters, in full. The next backward
  // outside it reduces the sum. (Without the scope, each backward reduces, and the averages add up.) All ranks must
  // open it alike, around both forward and backward. Throws std::logic_error inside a backward pass.
  ScopeExit no_sync();

  // Sets the divisor of sums over ranks, from the next backward on, in place of the number of ranks (FSDP2's
  // set_gradient_divide_factor). Example: the number of tokens of all ranks, if losses are sums over tokens. Must be
  // equal on all ranks. Throws std::invalid_argument unless it is above 0.
  void set_gradient_divide_factor(double factor);

  // Sets the divisor to the sum of `own` over the ranks, and returns it. For losses that are sums over tokens: `own` is
  // the number of tokens in this rank's part of the step, all micro-batches together, and the gradients are those of
  // the mean over all tokens. Must be called before the first backward of the step. Collective, one small all-reduce.
  // Throws std::invalid_argument, on all ranks, if a number is negative or the sum is 0.
  int64_t divide_gradients_by_sum(int64_t own);

  // Scales the gradients so that their norm over all parameters and ranks is at most max_norm, and returns the norm
  // before, like torch::nn::utils::clip_grad_norm_: a NaN norm makes all gradients NaN. norm_type may be infinity. Must
  // be called between backward and step. Collective, unless every rank has all gradients (DistributedDataParallel).
  // Throws std::invalid_argument for max_norm < 0 or norm_type <= 0; std::runtime_error if error_if_nonfinite and the
  // norm is not finite; std::logic_error if gradients are not ready for a step.
  double clip_grad_norm_(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false) {
    return clip_grad_norm_on_device_(max_norm, norm_type, error_if_nonfinite);
  }
  // Does not wait for a device to compute the norm.
  virtual GradNorm clip_grad_norm_on_device_(double max_norm, double norm_type = 2.0,
                                             bool error_if_nonfinite = false) = 0;

  // Bytes that the wrapper holds now, and their peaks since the last reset_peak_memory(). Not collective.
  virtual MemoryReport memory() const = 0;
  // Resets the peaks of memory() to the current values.
  virtual void reset_peak_memory() = 0;

 private:
  friend class CapturedStep;
  virtual internal::BackwardPass& backward_pass() const = 0;
  virtual const torch::nn::Module& wrapped_module() const = 0;
};

// A training step that the device replays as one CUDA graph, at the host's cost of one launch: forward, backward,
// clipping, and the step of tessera::Adam, AdamW and SGD, also under OSS. Steps of other optimizers follow eagerly.
// Learning rates, step counts and loaded checkpoints are followed; docs/gpu.md lists the refused changes.
//
//   tessera::CapturedStep step(fsdp, optimizer, [&](const auto& in) { return torch::mse_loss(fsdp(in[0]), in[1]); });
//   for (auto& batch : batches) at::Tensor loss = step({batch.x, batch.y});
//
// The bits are those of the loop without a capture. The first calls are eager steps; the next one captures. Every call
// clears gradients first, and trains one step. docs/gpu.md lists the models and options that cannot be captured; such a
// step throws, by name.
//
// The step owns its stream, and is ordered after and before the work of the caller's. It keeps the gradients, buffers
// and activations of a step in memory of its own. Must be used by one thread, and alike on all ranks.
class CapturedStep {
 public:
  // Computes the loss, of one element, by the wrapper's forward. It is called in eager steps and once for the capture,
  // so what the host does in it, apart from calling operators, is not repeated by replays.
  using Body = std::function<at::Tensor(const std::vector<at::Tensor>& inputs)>;
  // `wrapper` and `optimizer` must outlive it. `max_norm`: clips the norm of the gradients; empty: does not clip.
  // `eager_steps`: before the capture, 2 or more. Throws std::invalid_argument, naming the option, if a wrapper or its
  // group cannot be captured, on CPUs, and in a build without TESSERA_CUDA.
  CapturedStep(DataParallel& wrapper, torch::optim::Optimizer& optimizer, Body body,
               std::optional<double> max_norm = {}, int eager_steps = 3);
  ~CapturedStep();

  // Trains one step and returns its loss on the device, without waiting for it. Inputs are copied; they may be in host
  // memory, and must have the sizes, strides and dtypes of the first call. Collective. Throws std::invalid_argument if
  // they differ, or if a part of the step cannot be captured; std::logic_error if the model, its mode, autocast or the
  // optimizer have changed since the capture so that replays would not follow, as docs/gpu.md lists. If the capture
  // itself fails, its group is aborted with that reason.
  at::Tensor operator()(const std::vector<at::Tensor>& inputs);

  // Whether later calls replay.
  bool is_captured() const;
  // The norm of the last step's gradients before clipping; 0 without max_norm.
  GradNorm norm() const;

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace tessera
