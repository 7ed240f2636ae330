#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include <tessera/detail/listed_optimizer.h>

namespace tessera {

// Options of AdamW8bit, each set by a function of its name.
struct AdamW8bitOptions : ListedBetas<AdamW8bitOptions> {
  // As checkpoints have it.
  static constexpr const char* kName = "AdamW8bit";

  // With this learning rate.
  explicit AdamW8bitOptions(double lr = 1e-3) : ListedBetas(lr, 0.9, 0.999, 1e-2) {}

  TORCH_ARG(double, eps) = 1e-8;  // added to the denominator
  // false: Adam, with weight decay through the gradient.
  TORCH_ARG(bool, decoupled) = true;
  // Parameters of fewer elements have states in fp32, as bitsandbytes' min_8bit_size. Of states that are made from then
  // on: those that are there, from a checkpoint say, stay of the kind that they are.
  TORCH_ARG(int64_t, min_8bit_numel) = 4096;

 public:
  // Throws std::invalid_argument for a value out of its range.
  void check() const;
  // Calls visit(name, value) for each.
  template <class Visit>
  void visit(Visit visit) {
    ListedBetas::visit(visit);
    visit("eps", eps());
    visit("decoupled", decoupled());
    auto least = static_cast<double>(min_8bit_numel());
    visit("min_8bit_numel", least);
    min_8bit_numel(static_cast<int64_t>(least));
  }
};

// What AdamW8bit keeps for a parameter.
struct AdamW8bitParamState : ListedState<AdamW8bitParamState> {
  TORCH_ARG(int64_t, step) = 0;             // steps taken
  TORCH_ARG(at::Tensor, exp_avg);           // fp32, of small parameters
  TORCH_ARG(at::Tensor, exp_avg_sq);        // of their squares
  TORCH_ARG(at::Tensor, exp_avg_8bit);      // uint8, of the parameter's shape: places in dynamic_map()
  TORCH_ARG(at::Tensor, exp_avg_scale);     // fp32, of a block each: its largest absolute value
  TORCH_ARG(at::Tensor, exp_avg_sq_8bit);   // see above
  TORCH_ARG(at::Tensor, exp_avg_sq_scale);  // see above

 public:
  // Calls visit(name, value) for each.
  template <class Visit>
  void visit(Visit visit) {
    visit("step", step());
    visit("exp_avg", exp_avg());
    visit("exp_avg_sq", exp_avg_sq());
    visit("exp_avg_8bit", exp_avg_8bit());
    visit("exp_avg_scale", exp_avg_scale());
    visit("exp_avg_sq_8bit", exp_avg_sq_8bit());
    visit("exp_avg_sq_scale", exp_avg_sq_scale());
  }
  // The state of a parameter to which set_data() has given other strides since: in the order of its memory now. Values
  // in 8 bit are then in other blocks, and rounded once more, as in a step. Tensors are replaced, not written.
  void lay_out_as(const at::Tensor& parameter);
};

// AdamW, or Adam, with states in 8 bit (Dettmers et al., 2022; bitsandbytes' AdamW8bit): each block of 256 elements is
// scaled by its largest absolute value and rounded to the nearest of 256 values of the dynamic map. 2 bytes and 1/32 a
// parameter in place of 8.
//
// Blocks are the parameter's, counted in the order of its memory, wherever it is cut (that of the codes', if set_data()
// has given the parameter other strides since the last step: see lay_out_as()). Ranks that share a block agree on
// its scale, in one all-reduce a step of two numbers for each cut, so the parameters have the same bits at every world
// size, given the same gradients, and a checkpoint goes on at any other. A step works through a million elements at a
// time, in fp32.
class AdamW8bit : public ListedOptimizer<AdamW8bitOptions, AdamW8bitParamState, Sees::kParameters> {
 public:
  using ListedOptimizer::ListedOptimizer;
  // Throws CommError, and std::invalid_argument for sparse gradients and parameters that are not dense.
  at::Tensor step(LossClosure closure = nullptr) override;

 private:
  struct Work;
  using SharedScales = std::map<std::pair<size_t, int64_t>, std::pair<float, float>>;  // by parameter and block
  Work work_of(const at::Tensor& parameter, const AdamW8bitOptions& options, bool has_gradient);
  SharedScales shared_scales(const std::vector<Work>& all) const;
};

// The 256 values of bitsandbytes' dynamic map, ascending: a sign, as many bits of exponent as there are zeros before
// the first one, and a linear fraction in the bits that are left. [256], fp32.
at::Tensor dynamic_map(bool is_signed);

}  // namespace tessera
