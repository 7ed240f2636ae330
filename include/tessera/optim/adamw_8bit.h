#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include <tessera/detail/listed_optimizer.h>

namespace tessera {

// Options of AdamW8bit; each field has a setter of its name.
struct AdamW8bitOptions : internal::ListedBetas<AdamW8bitOptions> {
  static constexpr const char* kName = "AdamW8bit";  // name in checkpoints

  explicit AdamW8bitOptions(double lr = 1e-3) : ListedBetas(lr, 0.9, 0.999, 1e-2) {}  // `lr`: the learning rate

  TORCH_ARG(double, eps) = 1e-8;      // added to the denominator
  TORCH_ARG(bool, decoupled) = true;  // true: AdamW; false: Adam, which adds weight decay to the gradient
  // A new state is fp32 if the parameter has fewer elements than this, as with bitsandbytes' min_8bit_size. Existing
  // states, for example from a checkpoint, keep their format.
  TORCH_ARG(int64_t, min_8bit_numel) = 4096;

 public:
  void check() const;  // throws std::invalid_argument if a value is out of range
  // Calls visit(name, value) for each option.
  void visit(auto visit) {
    ListedBetas::visit(visit);
    visit("eps", eps());
    visit("decoupled", decoupled());
    internal::visit_whole_number(visit, "min_8bit_numel", min_8bit_numel());
  }
};

// AdamW8bit's state of one parameter.
struct AdamW8bitParamState : internal::ListedState<AdamW8bitParamState> {
  TORCH_ARG(int64_t, step) = 0;             // number of steps taken
  TORCH_ARG(at::Tensor, exp_avg);           // small parameters: average of gradients, fp32
  TORCH_ARG(at::Tensor, exp_avg_sq);        // small parameters: average of squared gradients, fp32
  TORCH_ARG(at::Tensor, exp_avg_8bit);      // uint8, of the parameter's shape: indices into dynamic_map(true)
  TORCH_ARG(at::Tensor, exp_avg_scale);     // fp32, one for each block: the largest absolute value
  TORCH_ARG(at::Tensor, exp_avg_sq_8bit);   // squared gradients: indices into dynamic_map(false)
  TORCH_ARG(at::Tensor, exp_avg_sq_scale);  // as exp_avg_scale, for squared gradients

 public:
  // Calls visit(name, value) for each field.
  void visit(auto visit) {
    visit("step", step());
    visit("exp_avg", exp_avg());
    visit("exp_avg_sq", exp_avg_sq());
    visit("exp_avg_8bit", exp_avg_8bit());
    visit("exp_avg_scale", exp_avg_scale());
    visit("exp_avg_sq_8bit", exp_avg_sq_8bit());
    visit("exp_avg_sq_scale", exp_avg_sq_scale());
  }
  // Permutes the state to the memory order of the parameter, whose strides set_data() may have changed. Encodes 8-bit
  // values again, in new blocks, which rounds them once more. Replaces tensors instead of writing to them.
  void lay_out_as(const at::Tensor& parameter);
};

// AdamW or Adam with 8-bit states (Dettmers et al., 2022; bitsandbytes' AdamW8bit). Each block of 256 elements is
// scaled by its largest absolute value and rounded to the nearest of 256 values of the dynamic map. The state of an
// element takes 2 1/32 bytes instead of 8.
//
// Blocks divide the whole parameter in memory order, independent of shards. lay_out_as() adapts the blocks to changed
// strides. One all-reduce per step computes the scales of blocks that several ranks share, with two numbers for each
// such block. So with equal gradients, parameters are bit-equal at every world size, and a checkpoint can be loaded at
// any world size. A step processes a million elements at a time, in fp32. The parameters themselves keep their dtype.
class AdamW8bit : public internal::ListedOptimizer<AdamW8bitOptions, AdamW8bitParamState, internal::Sees::kParameters> {
 public:
  using ListedOptimizer::ListedOptimizer;
  // Takes one step. Throws CommError. Throws std::invalid_argument for sparse gradients and non-dense parameters.
  at::Tensor step(LossClosure closure = nullptr) override;

 private:
  struct Work;
  using SharedScales = std::map<std::pair<size_t, int64_t>, std::pair<float, float>>;  // scales by parameter and block
  Work work_of(const at::Tensor& parameter, const AdamW8bitOptions& options, bool has_gradient);
  SharedScales shared_scales(const std::vector<Work>& all) const;
};

// Returns the 256 values of bitsandbytes' dynamic map, ascending: [256], fp32. They are 0, 1, and numbers of 7 decimal
// orders of magnitude, evenly spaced within each. If `is_signed`, about half of the values are negative.
at::Tensor dynamic_map(bool is_signed);

}  // namespace tessera
