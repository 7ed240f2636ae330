#include "optim/host/adam_kernel.h"

#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define TESSERA_X86 1
#endif

namespace tessera::internal {
namespace {

// Number of new fp32 values in a chunk. A chunk stays in the first-level cache until it has been rounded to 16 bits.
constexpr int64_t kCachedNumel = 2048;

// The loop that each of the update_*() functions below vectorizes for its instruction set. Must be inlined, because an
// out-of-line copy would use baseline instructions. Writes the new state to `to`. If kBeside, `to` is separate memory
// and also receives the old parameter; otherwise `to` is `span`.
template <bool kBeside, bool kDecoupled, bool kAmsgrad>
[[gnu::always_inline]] inline void update(const AdamSpan& span, const AdamSpan& to, const AdamFactors& f) {
  float* parameter = span.parameter;
  const float* gradient = span.gradient;
  const float *average = span.average, *square = span.square, *maximum = span.maximum;
  float *before = to.parameter, *new_average = to.average, *new_square = to.square, *new_maximum = to.maximum;
  // Two arrays are either equal or do not overlap. Without this pragma, GCC would need too many runtime checks for
  // overlap, and would not vectorize the loop.
#pragma GCC ivdep
  for (int64_t i = 0; i < span.numel; ++i) {
    float p = parameter[i];
    float g = gradient[i];
    if constexpr (kBeside) before[i] = p;
    if constexpr (kDecoupled) {
      p *= f.decay;
    } else {
      g += f.decay * p;
    }
    const float m = f.beta1 * average[i] + f.one_minus_beta1 * g;
    const float v = f.beta2 * square[i] + f.one_minus_beta2 * g * g;
    new_average[i] = m;
    new_square[i] = v;
    float largest = v;
    if constexpr (kAmsgrad) {
      largest = maximum[i] > v ? maximum[i] : v;
      new_maximum[i] = largest;
    }
    parameter[i] = p - f.step * m / (std::sqrt(largest) * f.root_correction + f.eps);
  }
}

template <bool kBeside>
[[gnu::always_inline]] inline void update_any(const AdamSpan& span, const AdamSpan& to, const AdamFactors& f) {
  if (f.is_decoupled) {
    span.maximum != nullptr ? update<kBeside, true, true>(span, to, f) : update<kBeside, true, false>(span, to, f);
  } else {
    span.maximum != nullptr ? update<kBeside, false, true>(span, to, f) : update<kBeside, false, false>(span, to, f);
  }
}

[[gnu::always_inline]] inline void round_to_bfloat16(const float* __restrict from, uint16_t* __restrict to,
                                                     int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &from[i], sizeof(bits));
    const uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
    to[i] = static_cast<uint16_t>((bits & 0x7FFFFFFFU) > 0x7F800000U ? 0x7FC0U : rounded);
  }
}

void round_to_half(const float* from, uint16_t* to, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) to[i] = c10::Half(from[i]).x;
}

template <bool kBeside>
void update_baseline(const AdamSpan& span, const AdamSpan& to, const AdamFactors& f) {
  update_any<kBeside>(span, to, f);
}
void bfloat16_baseline(const float* from, uint16_t* to, int64_t numel) { round_to_bfloat16(from, to, numel); }

#ifdef TESSERA_X86
template <bool kBeside>
[[gnu::target("avx2,fma")]] void update_avx2(const AdamSpan& span, const AdamSpan& to, const AdamFactors& f) {
  update_any<kBeside>(span, to, f);
}
template <bool kBeside>
[[gnu::target("avx512f,avx512bw,avx512vl,prefer-vector-width=512")]] void update_avx512(const AdamSpan& span,
                                                                                        const AdamSpan& to,
                                                                                        const AdamFactors& f) {
  update_any<kBeside>(span, to, f);
}
[[gnu::target("avx2,fma")]] void bfloat16_avx2(const float* from, uint16_t* to, int64_t numel) {
  round_to_bfloat16(from, to, numel);
}
[[gnu::target("avx2,f16c")]] void half_avx2(const float* from, uint16_t* to, int64_t numel) {
  int64_t i = 0;
  for (; i + 8 <= numel; i += 8) {
    const __m128i eight = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), eight);
  }
  round_to_half(from + i, to + i, numel - i);
}
#endif

using Update = void (*)(const AdamSpan&, const AdamSpan&, const AdamFactors&);
using Round = void (*)(const float*, uint16_t*, int64_t);

struct Kernels {
  Update update = &update_baseline<false>, update_beside = &update_baseline<true>;
  Round bfloat16 = &bfloat16_baseline;
  Round half = &round_to_half;
  const char* name = "baseline";
};

Kernels choose() {
  Kernels kernels;
#ifdef TESSERA_X86
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    kernels = {&update_avx2<false>, &update_avx2<true>, &bfloat16_avx2, &round_to_half, "avx2"};
    if (__builtin_cpu_supports("f16c")) kernels.half = &half_avx2;
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    kernels.update = &update_avx512<false>;
    kernels.update_beside = &update_avx512<true>;
    kernels.name = "avx512";
  }
#endif
  return kernels;
}

const Kernels& kernels() {
  static const Kernels chosen = choose();
  return chosen;
}

void step(const AdamSpan& span, const AdamSpan& to, const AdamFactors& factors, Update update_all) {
  const Kernels& chosen = kernels();
  if (span.low_precision_dtype == LowPrecision::kNone) return update_all(span, to, factors);
  const Round round = span.low_precision_dtype == LowPrecision::kBFloat16 ? chosen.bfloat16 : chosen.half;
  for (int64_t begin = 0; begin < span.numel; begin += kCachedNumel) {
    const int64_t end = std::min(begin + kCachedNumel, span.numel);
    const AdamSpan cached = span.part(begin, end);
    update_all(cached, to.part(begin, end), factors);
    round(cached.parameter, cached.low_precision, cached.numel);
  }
}

}  // namespace

AdamFactors adam_factors(const AdamRule& rule, int64_t step) {
  const auto t = static_cast<double>(step);
  const double correction1 = 1 - std::pow(rule.beta1, t), correction2 = 1 - std::pow(rule.beta2, t);
  auto single = [](double value) { return static_cast<float>(value); };
  return {.beta1 = single(rule.beta1),
          .one_minus_beta1 = single(1 - rule.beta1),
          .beta2 = single(rule.beta2),
          .one_minus_beta2 = single(1 - rule.beta2),
          .step = single(rule.lr / correction1),
          .root_correction = single(1 / std::sqrt(correction2)),
          .eps = single(rule.eps),
          .decay = single(rule.is_decoupled ? 1 - rule.lr * rule.weight_decay : rule.weight_decay),
          .is_decoupled = rule.is_decoupled};
}

AdamSpan AdamSpan::part(int64_t begin, int64_t end) const {
  AdamSpan span = *this;
  span.parameter += begin;
  span.gradient += begin;
  span.average += begin;
  span.square += begin;
  if (maximum != nullptr) span.maximum += begin;
  if (low_precision != nullptr) span.low_precision += begin;
  span.numel = end - begin;
  return span;
}

void adam_step(const AdamSpan& span, const AdamFactors& factors) { step(span, span, factors, kernels().update); }

void adam_step_beside(const AdamSpan& span, const AdamSpan& beside, const AdamFactors& factors) {
  step(span, beside, factors, kernels().update_beside);
}

const char* adam_instructions() { return kernels().name; }

}  // namespace tessera::internal
