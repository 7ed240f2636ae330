// libtorch's fused kernels that Tessera calls, measured against formulas in fp64.
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>

#include "optim/host/fused_kernels.h"
#include "tests/support/reference.h"

namespace tessera::fused_kernels_test {
using namespace internal;
namespace {

using namespace testing_support;

constexpr std::array kDtypes{at::kDouble, at::kFloat, at::kBFloat16, at::kHalf};
constexpr std::array kCounts{1, 7, 8, 15, 16, 17, 31, 33, 1000};

double rounding(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return 0x1p-53;
    case at::kFloat:
      return 0x1p-24;
    case at::kHalf:
      return 0x1p-11;
    default:
      return 0x1p-8;
  }
}

// Options as bits. SGD: decay, momentum, dampening, nesterov. Adam: decay, amsgrad, small epsilon, zero gradients.
bool has(int options, int bit) { return (options >> bit & 1) != 0; }

// A parameter with its state, in a kernel's dtype or in fp64.
struct Values {
  at::Tensor parameter, gradient, average, square, maximum;
  std::array<at::Tensor*, 4> written() { return {&parameter, &average, &square, &maximum}; }
};

void sgd_kernel(Values& v, int options, int step) {
  std::vector<at::Tensor> momenta;
  if (has(options, 1)) momenta = {v.average};
  at::_fused_sgd_({v.parameter}, {v.gradient}, momenta, has(options, 0) ? 0.1 : 0, has(options, 1) ? 0.9 : 0, 1.0,
                  has(options, 2) ? 0.3 : 0, has(options, 3), false, step == 1);
}
void sgd_formula(Values& v, int options, int step) {
  at::Tensor direction = v.gradient + (has(options, 0) ? 0.1 : 0) * v.parameter;
  if (has(options, 1)) {
    v.average = step == 1 ? direction : 0.9 * v.average + (has(options, 2) ? 0.7 : 1.0) * direction;
    direction = has(options, 3) ? direction + 0.9 * v.average : v.average;
  }
  v.parameter = v.parameter - direction;
}

double epsilon(int options) { return has(options, 2) ? 1e-8 : 1e-3; }
template <bool decoupled>
void adam_kernel(Values& v, int options, int step) {
  std::vector<at::Tensor> maxima;
  if (has(options, 1)) maxima = {v.maximum};
  const auto kernel = [&](const auto&... arguments) {
    decoupled ? at::_fused_adamw_(arguments...) : at::_fused_adam_(arguments...);
  };
  using List = std::vector<at::Tensor>;
  kernel(List{v.parameter}, List{v.gradient}, List{v.average}, List{v.square}, maxima,
         List{torch::full({}, step, at::kFloat)}, 1.0, 0.9, 0.99, has(options, 0) ? 0.1 : 0, epsilon(options),
         has(options, 1), false);
}
template <bool decoupled>
void adam_formula(Values& v, int options, int step) {
  const double decay = has(options, 0) ? 0.1 : 0;
  const at::Tensor g = decoupled ? v.gradient : v.gradient + decay * v.parameter;
  v.average = 0.9 * v.average + 0.1 * g;
  v.square = 0.99 * v.square + 0.01 * g * g;
  if (has(options, 1)) v.maximum = torch::maximum(v.maximum, v.square);
  const at::Tensor root = ((has(options, 1) ? v.maximum : v.square) / (1 - std::pow(0.99, step))).sqrt();
  v.parameter =
      v.parameter * (decoupled ? 1 - decay : 1) - v.average / (1 - std::pow(0.9, step)) / (root + epsilon(options));
}

using Step = void (*)(Values& values, int options, int step);
// Returns a description of the first wrong values, "" if there are none. Each step starts from the kernel's values.
std::string fault_of(Step kernel, Step formula, at::ScalarType dtype, bool zero_gradients_are_tried) {
  for (const int count : kCounts) {
    for (int options = 0; options < 16; ++options) {
      auto random = [&](int seed) { return seeded(seed, [&] { return torch::randn({count}); }).to(dtype); };
      const at::Tensor none = torch::zeros({count}, dtype);
      Values own{random(1), none, none.clone(), none.clone(), none.clone()};
      for (int step = 1; step <= 2; ++step) {
        own.gradient = zero_gradients_are_tried && has(options, 3) ? none.clone() : random(1 + step);
        const at::Tensor given = own.gradient.clone();
        Values exact = own;
        for (at::Tensor* tensor : exact.written()) *tensor = tensor->to(at::kDouble).clone();
        exact.gradient = own.gradient.to(at::kDouble);
        formula(exact, options, step);
        kernel(own, options, step);
        const double limit = 16 * rounding(dtype);
        for (size_t i = 0; i < own.written().size(); ++i)
          if (!torch::allclose(own.written()[i]->to(at::kDouble), *exact.written()[i], limit, limit))
            return c10::str(dtype, ", ", count, " elements, options ", options, ", step ", step, ", tensor ", i);
        if (!torch::equal(own.gradient, given)) return c10::str(dtype, " changes gradients");
      }
    }
  }
  return "";
}

TEST(FusedKernels, ThoseInUseAreRightAtEverySizeAndOption) {
  for (const at::ScalarType dtype : kDtypes) {
    EXPECT_EQ(fault_of(&adam_kernel<false>, &adam_formula<false>, dtype, true), "");
    EXPECT_EQ(fault_of(&adam_kernel<true>, &adam_formula<true>, dtype, true), "");
    if (!fused_sgd_is_right(dtype, at::kCPU)) continue;
    EXPECT_EQ(fault_of(&sgd_kernel, &sgd_formula, dtype, false), "");
  }
}

TEST(FusedKernels, SgdOf16BitsHasTorchsBits) {
  auto options = [] { return torch::optim::SGDOptions(0.1); };
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    auto weight = torch::zeros({32}, dtype).set_requires_grad(true);
    weight.mutable_grad() = torch::arange(1, 33, dtype);
    SGD({weight}, torch::optim::SGDOptions(1)).step();
    EXPECT_TRUE(torch::equal(weight.detach(), -torch::arange(1, 33, dtype))) << weight;
    for (const auto& tried : {options(), options().weight_decay(0.1), options().momentum(0.9).dampening(0.3),
                              options().momentum(0.9).nesterov(true).weight_decay(0.1)})
      for (const int64_t count : {1, 7, 8, 15, 16, 17, 31, 33, 1000}) {
        const at::Tensor start = seeded(count, [&] { return torch::randn({count}); }).to(dtype);
        auto own = start.clone().set_requires_grad(true), expected = start.clone().set_requires_grad(true);
        SGD ours({own}, tried);
        torch::optim::SGD torchs({expected}, tried);
        for (int t = 1; t <= 3; ++t) {
          own.mutable_grad() = seeded(t, [&] { return torch::randn({count}); }).to(dtype);
          expected.mutable_grad() = own.grad().clone();
          ours.step();
          torchs.step();
        }
        EXPECT_TRUE(torch::equal(own, expected)) << dtype << " " << count << " momentum " << tried.momentum();
      }
  }
}

}  // namespace
}  // namespace tessera::fused_kernels_test
