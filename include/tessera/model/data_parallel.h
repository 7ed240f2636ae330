#pragma once

#include <torch/nn/module.h>
#include <torch/ordered_dict.h>
#include <cstdint>

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <tessera/model/grad_norm.h>
#include <tessera/model/model_shards.h>
#include <tessera/scope_exit.h>

namespace torch::optim {
class Optimizer;
}

namespace tessera {

// The bytes of tensors that a wrapper holds on this rank.
struct MemoryReport {
  int64_t shard_bytes = 0;           // this rank's part of the parameters
  int64_t grad_bytes = 0;            // this rank's part of the gradients
  int64_t gathered_bytes = 0;        // full parameters of units that are unsharded now, or being unsharded
  int64_t peak_gathered_bytes = 0;   // the peak of gathered_bytes
  int64_t secondary_bytes = 0;       // secondary shards that exist now, for backward (hybrid sharding)
  int64_t peak_secondary_bytes = 0;  // the peak of secondary_bytes
  int64_t bucket_bytes = 0;          // gradient buckets that exist now, before or during reduction
  int64_t peak_bucket_bytes = 0;     // the peak of bucket_bytes
  int64_t largest_unit_bytes = 0;    // full parameters of the largest unit
  int64_t unsharded_bytes = 0;       // the parameters of the whole model
  int64_t staging_bytes = 0;         // with offload: staging buffers that exist now, for copies to and from the device
  int64_t peak_staging_bytes = 0;    // the peak of staging_bytes

  // The current bytes in each kind of memory. host_bytes includes pinned_bytes, which on CPUs are not locked.
  int64_t device_bytes = 0;
  int64_t host_bytes = 0;
  int64_t pinned_bytes = 0;
  int64_t disk_bytes = 0;
};

namespace internal {
class BackwardPass;

// Returns the module of a holder or pointer. Throws std::invalid_argument if `holder` is empty.
template <class Holder>
torch::nn::Module& module_in_holder(Holder& holder) {
  if (!holder) throw std::invalid_argument("a wrapper was given an empty module holder, expected one with a module");
  return *holder;
}
}  // namespace internal

// Returns the defined buffers of a module, under each of their names.
torch::OrderedDict<std::string, at::Tensor> defined_buffers(const torch::nn::Module& module);

// The interface of all wrappers for training loops. forward() is in the derived classes.
//
// Must be used by one thread at a time. If a second thread calls forward() or clip_grad_norm_() while the first is in
// one of these calls or in backward, the second thread's call throws std::logic_error, and the first thread continues.
// On CPUs this also holds for a second backward. Some other calls are checked, too, but not all.
class DataParallel : public ModelShards {
 public:
  // While the scope exists, backward adds up this rank's own full gradients of all parameters. The next backward
  // outside the scope reduces the sum. (Without a scope, each backward reduces, and `.grad` sums the averages.) All
  // ranks must open the scope alike, around forward and backward. Throws std::logic_error inside a backward pass.
  ScopeExit no_sync();

  // Sets the divisor of gradients that are summed over ranks (FSDP2's set_gradient_divide_factor); default: the number
  // of ranks. Applies to the reductions of later backwards, also to sums that were begun under no_sync(). If losses are
  // sums over tokens, the divisor may be the number of tokens of all ranks. Must be equal on all ranks. Throws
  // std::invalid_argument unless `factor` is above 0, and std::logic_error inside a backward pass. Under DDP and
  // SDP, must not change between the parts of a sum that was begun under no_sync() on top of an average.
  void set_gradient_divide_factor(double factor);

  // Sets the divisor to the sum of `own` over the ranks, and returns the sum. For losses that are sums over tokens:
  // `own` is the number of tokens in this rank's part of the step, in all micro-batches together. Gradients are then
  // those of the mean over all tokens. Must be called before the first backward of the step. Collective: one small
  // all-reduce. If a rank's number is negative or the sum is 0, all ranks throw std::invalid_argument.
  int64_t divide_gradients_by_sum(int64_t own);

  // Scales the gradients so that their norm over all parameters and ranks is at most max_norm. Returns the norm before
  // scaling. Like in torch::nn::utils::clip_grad_norm_, a NaN norm makes all gradients NaN, and norm_type may be
  // infinity. Must be called between backward and step. Collective, unless every rank has all gradients
  // (DistributedDataParallel). Throws std::invalid_argument for max_norm < 0 or norm_type <= 0, std::runtime_error if
  // error_if_nonfinite and the norm is not finite, and std::logic_error if gradients are not ready for a step.
  double clip_grad_norm_(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false) {
    return clip_grad_norm_on_device_(max_norm, norm_type, error_if_nonfinite);
  }
  // Like clip_grad_norm_(), but waits for a device to compute the norm only if error_if_nonfinite is set.
  virtual GradNorm clip_grad_norm_on_device_(double max_norm, double norm_type = 2.0,
                                             bool error_if_nonfinite = false) = 0;

  // Returns the bytes that the wrapper holds now, and their peaks since the last reset_peak_memory(). Not collective.
  virtual MemoryReport memory() const = 0;
  virtual void reset_peak_memory() = 0;  // resets the peaks of memory() to the current values

 private:
  friend class CapturedStep;
  virtual internal::BackwardPass& backward_pass() const = 0;
};

// A training step that the device replays as one CUDA graph, with one launch by the host. The graph contains forward,
// backward, clipping, and the steps of tessera::Adam, AdamW and SGD, also under OSS. Other optimizers step outside the
// graph. Replays use the current learning rates, step counts and loaded checkpoints. Some changes are refused
// (docs/gpu.md).
//
//   tessera::CapturedStep step(fsdp, optimizer, [&](const auto& in) { return torch::mse_loss(fsdp(in[0]), in[1]); });
//   for (auto& batch : batches) at::Tensor loss = step({batch.x, batch.y});
//
// Results are bit-equal to those of the loop without a capture. The first calls are eager steps, and the next call
// captures. Every call clears gradients first, and trains one step. If the model or an option cannot be captured
// (docs/gpu.md has a list), a call throws an error that names the cause.
//
// The step runs on its own stream, after earlier and before later work of the caller's stream. It keeps gradients,
// buffers and activations in memory of its own. Must be used by one thread, and by all ranks alike.
class CapturedStep {
 public:
  // Computes the loss with the wrapper's forward, and returns it: a tensor of one element that requires a gradient.
  // Called in eager steps and once in the capture. Replays repeat only the operators that Body calls, not its other
  // work on the host.
  using Body = std::function<at::Tensor(const std::vector<at::Tensor>& inputs)>;
  // `wrapper` and `optimizer` must outlive this object. `max_norm`: upper limit of the norm of the wrapper's gradients;
  // empty: no clipping. Gradients of other wrappers are not clipped. `eager_steps`: number of steps before the capture,
  // 2 or more. Throws std::invalid_argument on CPUs and in builds without TESSERA_CUDA, and if the wrapper or its group
  // cannot be captured. The error names the option.
  CapturedStep(DataParallel& wrapper, torch::optim::Optimizer& optimizer, Body body,
               std::optional<double> max_norm = {}, int eager_steps = 3);
  ~CapturedStep();

  // Trains one step and returns its loss on the device, without waiting for the loss. Inputs are copied, and may be in
  // host memory. The host does not wait for copies from page-locked memory. Such memory must not be changed before the
  // step has run. Inputs must have the sizes, strides and dtypes of the first call's inputs. Collective. Throws
  // std::invalid_argument if inputs differ, or if a part of the step cannot be captured. If the model, its mode,
  // autocast or the optimizer has changed since the capture in a way that replays would ignore, throws std::logic_error
  // (docs/gpu.md). If the capture itself fails, aborts the group with the error as the reason.
  at::Tensor operator()(const std::vector<at::Tensor>& inputs);

  bool is_captured() const;  // true: the step is captured, and later calls replay it
  GradNorm norm() const;     // the last step's gradient norm before clipping; 0 if max_norm is empty

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace tessera
