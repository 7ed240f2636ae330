#pragma once

#include <cstdint>

namespace tessera::internal {

// A group's options: torch::optim::AdamOptions or AdamWOptions.
struct AdamRule {
  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
  bool amsgrad = false;
  bool is_decoupled = false;  // AdamW: weights decay by themselves. Adam: through the gradient
};

// What step `step` (the first is 1) is for all elements of a parameter, computed in double.
struct AdamFactors {
  float beta1 = 0, one_minus_beta1 = 0;
  float beta2 = 0, one_minus_beta2 = 0;
  float step = 0;             // lr / (1 - beta1^t)
  float root_correction = 0;  // 1 / sqrt(1 - beta2^t)
  float eps = 0;
  float decay = 0;  // AdamW: 1 - lr * weight_decay. Adam: weight_decay
  bool is_decoupled = true;
};
AdamFactors adam_factors(const AdamRule& rule, int64_t step);

enum class LowPrecision : uint8_t { kNone, kBFloat16, kHalf };

// Part of a parameter in host memory, fp32 all of it; `maximum` only with amsgrad, else null. `low_precision`
// gets the new values in 16 bit, rounded to nearest even as torch rounds them.
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

// One step of Adam or AdamW on all elements, in the vector instructions that the processor has; the low-precision
// copy is written while the new values are in the cache. One thread. (Loshchilov and Hutter, 2019, algorithm 2, in
// the order of torch::optim's operations.)
void adam_step(const AdamSpan& span, const AdamFactors& factors);

// The same step, bit for bit, with the new state written to `beside`, which also gets what the parameter was: so that
// the step can be taken back. (`beside` has no copy in 16 bit, and its gradient is not looked at.) One thread.
void adam_step_beside(const AdamSpan& span, const AdamSpan& beside, const AdamFactors& factors);

// "avx512", "avx2" or "baseline": what adam_step() uses here.
const char* adam_instructions();

}  // namespace tessera::internal
