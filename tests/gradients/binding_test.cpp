// Hooks on the module's parameters, and the changes of parameters that a binding refuses.
#include "core/gradients/binding.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "core/layout/unit_plan.h"
#include "tests/gradients/errors.h"

namespace tessera::binding_test {
using namespace internal;
namespace {

using gradients_test::error_of;
using gradients_test::expect_contains;

class Bindings : public testing::Test {
 protected:
  Bindings() {
    for (const auto& entry : linear->named_parameters()) planned.push_back({entry.key(), {}, entry.value()});
    binding = std::make_unique<Binding>(linear.ptr(), planned, "TheWrapper", /*rank=*/1);
    binding->set_take([this](size_t parameter, const at::Tensor& gradient) {
      taken.push_back(parameter);
      return returned.defined() ? gradient * returned : at::Tensor();
    });
  }
  void run_backward() { linear(torch::ones({1, 2})).sum().backward(); }

  torch::nn::Linear linear{2, 3};
  std::vector<PlannedParameter> planned;
  std::unique_ptr<Binding> binding;
  std::vector<size_t> taken;
  at::Tensor returned;  // a factor for autograd's gradient; undefined: autograd accumulates nothing
};

TEST_F(Bindings, TakeEachGradientOnceHoweverOftenTheyHook) {
  binding->hook_all();
  binding->hook_all();
  run_backward();
  EXPECT_EQ(taken.size(), 2U);
  EXPECT_FALSE(linear->weight.grad().defined());
  EXPECT_FALSE(linear->bias.grad().defined());
}

TEST_F(Bindings, LetAutogradAccumulateTheReturnedGradient) {
  returned = torch::full({}, 2.0);
  binding->hook_all();
  run_backward();
  EXPECT_TRUE(torch::equal(linear->weight.grad(), torch::full({3, 2}, 2.0)));
}

TEST_F(Bindings, HookAnewAfterSetDataDroppedTheHook) {
  binding->hook_all();
  linear->weight.set_data(torch::ones({3, 2}, at::kDouble).to(at::kFloat));
  linear->weight.unsafeGetTensorImpl()->set_autograd_meta(nullptr);  // as torch::load() does by way of set_()
  linear->weight.requires_grad_(true);
  binding->hook_all();
  run_backward();
  EXPECT_EQ(taken.size(), 2U);
}

TEST_F(Bindings, DoNotHookFrozenParameters) {
  linear->bias.requires_grad_(false);
  binding->hook_all();
  run_backward();
  EXPECT_EQ(taken, std::vector<size_t>{0});
}

TEST_F(Bindings, RefuseParametersThatWereRegisteredLater) {
  binding->require_nothing_new();
  linear->register_parameter("scale", torch::ones({1}));
  expect_contains(error_of<std::logic_error>([&] { binding->require_nothing_new(); }),
                  "parameter 'scale' was registered after the module was wrapped by TheWrapper");
}

TEST_F(Bindings, RefuseParametersOfAnotherDtype) {
  binding->require_same_kind(0);
  linear->to(at::kHalf);
  expect_contains(error_of<std::logic_error>([&] { binding->require_same_kind(0); }),
                  "parameter 'weight' on rank 1 is Half [3, 2] on cpu now, but was Float [3, 2] on cpu");
}

TEST_F(Bindings, RefuseHooksThatRunAfterAccumulation) {
  struct Ignores : torch::autograd::PostAccumulateGradHook {
    void operator()(const torch::autograd::Variable&) override {}
  };
  binding->hook_all();
  binding->require_no_hook_after(0);
  torch::autograd::impl::set_post_acc_grad_hooks(linear->weight, std::make_unique<Ignores>());
  expect_contains(error_of<std::logic_error>([&] { binding->require_no_hook_after(0); }),
                  "parameter 'weight' on rank 1 has a hook that runs when its gradient has been accumulated");
}

TEST_F(Bindings, RefuseChangesDuringForward) {
  torch::NoGradGuard no_grad;
  linear->weight.zero_();
  binding->note_versions();
  binding->require_same_versions("forward");
  linear->bias.zero_();
  expect_contains(error_of<std::logic_error>([&] { binding->require_same_versions("forward"); }),
                  "parameter 'bias' on rank 1 was changed during forward");
}

}  // namespace
}  // namespace tessera::binding_test
