// The host optimizers against the formula in double and against torch's, and their 16-bit copy.
#include <tessera/optim/host_adam.h>

#include <cmath>

#include "optim/host/adam_kernel.h"
#include "tests/support/reference.h"

namespace tessera::host_adam_test {
using namespace internal;
namespace {

using namespace testing_support;

// Loshchilov and Hutter, algorithm 2, element by element.
struct Formula {
  double lr, beta1, beta2, eps, decay;
  bool is_decoupled, amsgrad;
  at::Tensor m, v, largest;
  int64_t t = 0;

  void step(at::Tensor& p, at::Tensor g) {
    if (!m.defined()) m = torch::zeros_like(p), v = torch::zeros_like(p), largest = torch::zeros_like(p);
    ++t;
    if (is_decoupled)
      p = p * (1 - lr * decay);
    else
      g = g + decay * p;
    m = beta1 * m + (1 - beta1) * g;
    v = beta2 * v + (1 - beta2) * g * g;
    largest = torch::maximum(largest, v);
    const at::Tensor root = ((amsgrad ? largest : v) / (1 - std::pow(beta2, t))).sqrt();
    p = p - lr * (m / (1 - std::pow(beta1, t))) / (root + eps);
  }
};

template <class Optimizer, class Options>
void expect_the_formula(Options options, bool is_decoupled) {
  for (const int64_t numel : {1, 7, 64, 1000, 200001}) {
    auto own = seeded(numel, [&] { return torch::randn({numel}); }).set_requires_grad(true);
    at::Tensor expected = own.detach().to(at::kDouble).clone();
    Formula formula{options.lr(),     std::get<0>(options.betas()), std::get<1>(options.betas()),
                    options.eps(),    options.weight_decay(),       is_decoupled,
                    options.amsgrad()};
    Optimizer optimizer({own}, options);
    for (int step = 0; step < 8; ++step) {
      const at::Tensor gradient =
          seeded(1000 + step, [&] { return torch::randn({numel}); }) * (step % 3 == 0 ? 10 : 0.1);
      own.mutable_grad() = gradient;
      formula.step(expected, gradient.to(at::kDouble));
      optimizer.step();
    }
    const double error = (own.detach().to(at::kDouble) - expected).abs().max().template item<double>();
    EXPECT_LT(error, 2e-6) << numel << " elements, with " << adam_instructions();
  }
}

TEST(HostAdam, IsTheFormulaInDoublePrecisionToRounding) {
  using namespace torch::optim;
  for (const bool amsgrad : {false, true}) {
    for (const double decay : {0.0, 0.1}) {
      expect_the_formula<HostAdam>(AdamOptions(1e-2).betas({0.8, 0.95}).weight_decay(decay).amsgrad(amsgrad), false);
      expect_the_formula<HostAdamW>(AdamWOptions(1e-2).betas({0.8, 0.95}).weight_decay(decay).amsgrad(amsgrad), true);
    }
  }
}

std::vector<at::Tensor> parameters(at::ScalarType dtype) {
  std::vector<at::Tensor> made{torch::randn({3, 5}), torch::randn({1}),        torch::randn({0}),
                               torch::randn({}),     torch::randn({4, 6}).t(), torch::randn({70000})};
  for (auto& tensor : made) tensor = tensor.to(dtype).detach().set_requires_grad(true);
  return made;
}

TEST(HostAdam, AgreesWithTorchsForAnyParametersAndGradients) {
  for (const auto& [dtype, tolerance] : {std::pair{at::kFloat, 1e-5}, {at::kDouble, 1e-6}, {at::kBFloat16, 3e-2}}) {
    auto own = seeded(1, [&, kind = dtype] { return parameters(kind); }),
         expected = seeded(1, [&, kind = dtype] { return parameters(kind); });
    HostAdamW host(own, torch::optim::AdamWOptions(1e-2));
    torch::optim::AdamW plain(expected, torch::optim::AdamWOptions(1e-2));
    for (int step = 0; step < 6; ++step) {
      for (size_t i = 0; i < own.size(); ++i) {
        at::Tensor gradient = seeded(100 * step + i, [&] { return torch::randn(own[i].sizes()); }).to(dtype);
        if (own[i].dim() == 2 && step % 2 == 0) gradient = gradient.t().contiguous().t();
        own[i].mutable_grad() = (step + i) % 4 == 0 ? at::Tensor() : gradient;
        expected[i].mutable_grad() = (step + i) % 4 == 0 ? at::Tensor() : gradient.clone();
      }
      host.step();
      plain.step();
    }
    for (size_t i = 0; i < own.size(); ++i)
      EXPECT_TRUE(torch::allclose(own[i], expected[i], tolerance, tolerance)) << i;
  }
}

TEST(HostAdam, StepsSomeParametersNowAndOthersLater) {
  auto own = seeded(1, [] { return parameters(at::kFloat); }), other = seeded(1, [] { return parameters(at::kFloat); });
  HostAdam parts(own, torch::optim::AdamOptions(1e-2)), whole(other, torch::optim::AdamOptions(1e-2));
  for (int step = 0; step < 3; ++step) {
    for (size_t i = 0; i < own.size(); ++i)
      own[i].mutable_grad() = other[i].mutable_grad() =
          seeded(10 * step + i, [&] { return torch::randn(own[i].sizes()); });
    whole.step();
    parts.step_parameters({own[5], own[0]});
    parts.step_parameters({});
    parts.step_parameters({own[1], own[2], own[3], own[4]});
  }
  for (size_t i = 0; i < own.size(); ++i) EXPECT_TRUE(torch::equal(own[i], other[i])) << i;
  expect_contains(error_of<std::invalid_argument>([&] { parts.step_parameters({own[0], torch::ones({1})}); }),
                  "1 of 2 tensors");
}

// set_data() stores a matrix in another memory order between two steps.
TEST(HostAdam, RevocableStepsFollowAnotherMemoryOrder) {
  for (const bool repeats : {false, true}) {
    auto own = seeded(1, [] { return torch::randn({3, 5}); }).requires_grad_();
    auto expected = own.detach().clone().requires_grad_();
    HostAdamW revocable({own}, torch::optim::AdamWOptions(1e-2)), whole({expected}, torch::optim::AdamWOptions(1e-2));
    const auto steps = revocable.revocable_steps();
    for (int step = 0; step < 6; ++step) {
      if (step % 3 == 2) own.set_data(own.detach().t().contiguous().t());
      own.mutable_grad() = expected.mutable_grad() = seeded(10 + step, [] { return torch::randn({3, 5}); });
      steps->step({own});
      if (repeats) {
        steps->roll_back();
        steps->step({own});
      }
      steps->keep();
      whole.step();
      EXPECT_TRUE(torch::equal(own, expected)) << "step " << step << ", repeats " << repeats;
    }
  }
}

// All fp32 bit patterns that matter to rounding: the neighbours of every 16-bit value.
TEST(HostAdam, RoundsTheLowPrecisionCopyAsTorchDoes) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    std::vector<at::Tensor> pieces;
    const at::Tensor all = torch::arange(0, 65536, at::kInt).to(at::kShort).view(dtype).to(at::kFloat);
    for (const int offset : {-4097, -4096, -4095, -1, 0, 1, 4095, 4096, 4097, 32767, 32768, 32769})
      pieces.push_back((all.view(at::kInt) + offset).view(at::kFloat));
    at::Tensor values = torch::cat(pieces);
    const at::Tensor expected = values.to(dtype);
    at::Tensor rounded = torch::zeros_like(expected), state = torch::zeros({3, values.numel()});
    AdamFactors still;  // a step of length 0: beta and decay leave the parameter unchanged
    still.decay = 1;
    still.eps = 1;
    AdamSpan span{values.mutable_data_ptr<float>(), state[0].const_data_ptr<float>(),
                  state[1].mutable_data_ptr<float>(), state[2].mutable_data_ptr<float>()};
    span.low_precision = static_cast<uint16_t*>(rounded.mutable_data_ptr());
    span.low_precision_dtype = dtype == at::kHalf ? LowPrecision::kHalf : LowPrecision::kBFloat16;
    for (const int64_t begin : {int64_t{0}, int64_t{3}}) {  // full vectors, and their remainder
      span.numel = values.numel();
      adam_step(span.part(begin, values.numel()), still);
      const auto rest = at::indexing::Slice(begin);
      const at::Tensor is_nan = expected.isnan();
      EXPECT_TRUE(torch::equal(rounded.isnan().index({rest}), is_nan.index({rest})));
      const at::Tensor same = (rounded.view(at::kShort) == expected.view(at::kShort)).logical_or(is_nan);
      EXPECT_TRUE(same.index({rest}).all().item<bool>())
          << dtype << " " << values.index({same.logical_not()}).slice(0, 0, 5);
    }
  }
}

TEST(HostAdam, RefusesWhatItCannotStepBeforeAnythingIsChanged) {
  auto fine = torch::ones({2}).set_requires_grad(true), sparse = torch::ones({2}).set_requires_grad(true);
  HostAdamW optimizer({fine, sparse}, torch::optim::AdamWOptions(1e-2));
  fine.mutable_grad() = torch::ones({2});
  sparse.mutable_grad() = torch::ones({2}).to_sparse();
  expect_contains(error_of<std::invalid_argument>([&] { optimizer.step(); }), "layout Sparse");
  EXPECT_TRUE(torch::equal(fine, torch::ones({2})));
}

}  // namespace
}  // namespace tessera::host_adam_test
