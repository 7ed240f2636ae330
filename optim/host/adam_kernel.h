#pragma once

#include <cstdint>

namespace tessera::internal {

// Hyperparameters of a parameter group, from torch::optim::AdamOptions or AdamWOptions.
struct AdamRule {
  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
  bool amsgrad = false;
  bool is_decoupled = false;  // true (AdamW): decay scales the parameter; false (Adam): decay is added to the gradient
};

// Factors of step t, equal for all elements of a parameter. Computed in double, and then rounded to fp32.
struct AdamFactors {
  float beta1 = 0, one_minus_beta1 = 0;
  float beta2 = 0, one_minus_beta2 = 0;
  float step = 0;             // lr / (1 - beta1^t)
  float root_correction = 0;  // 1 / sqrt(1 - beta2^t)
  float eps = 0;
  float decay = 0;  // AdamW: 1 - lr * weight_decay. Adam: weight_decay
  bool is_decoupled = true;
};
AdamFactors adam_factors(const AdamRule& rule, int64_t step);  // the first step is 1

enum class LowPrecision : uint8_t { kNone, kBFloat16, kHalf };

// A range of an fp32 parameter in host memory, with its gradient and state. `maximum` is null without amsgrad. Unless
// null, `low_precision` receives the new values in 16 bits, rounded to nearest even as in torch.
struct AdamSpan {
  float* parameter = nullptr;
  const float* gradient = nullptr;
  float* average = nullptr;
  float* square = nullptr;
  float* maximum = nullptr;
  uint16_t* low_precision = nullptr;
  LowPrecision low_precision_dtype = LowPrecision::kNone;
  int64_t numel = 0;

  AdamSpan part(int64_t begin, int64_t end) const;
};

// Runs one step of Adam or AdamW on all elements of `span`, on the calling thread, with the processor's widest vector
// instructions. Writes the low-precision copy while the new values are in the cache. Implements algorithm 2 of
// Loshchilov and Hutter (2019), in torch::optim's order of operations.
void adam_step(const AdamSpan& span, const AdamFactors& factors);

// Runs a step that is bit-equal to adam_step() and can be rolled back, on the calling thread. Writes the new state and
// the old parameter to `beside`, and the new parameter to `span`. Ignores beside.gradient and beside.low_precision.
void adam_step_beside(const AdamSpan& span, const AdamSpan& beside, const AdamFactors& factors);

// Returns the instruction set of adam_step() on this machine: "avx512", "avx2" or "baseline".
const char* adam_instructions();

}  // namespace tessera::internal
