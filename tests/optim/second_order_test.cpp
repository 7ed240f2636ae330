// Second derivatives by inputs, with each rank's own batch, under every wrapper: equal to one process.
#include "tests/optim/given_gradients.h"

namespace tessera::second_order_test {
using namespace internal;
namespace {

using namespace testing_support;

torch::nn::Sequential critic() {
  auto net = seeded(4, [] {
    return torch::nn::Sequential(torch::nn::Linear(6, 17), torch::nn::Tanh(), torch::nn::Linear(17, 9),
                                 torch::nn::SiLU(), torch::nn::Linear(9, 2));
  });
  net->to(at::kDouble);
  return net;
}

// WGAN-GP's penalty, and forces as in molecular dynamics.
template <class Net>
at::Tensor loss_of(Net& net, int step, int rank) {
  const at::Tensor x =
      seeded(10 * step + rank, [] { return torch::randn({5, 6}, at::kDouble); }).set_requires_grad(true);
  const at::Tensor y = call(net, x);
  const at::Tensor slope = torch::autograd::grad({y.square().sum()}, {x}, {}, true, /*create_graph=*/true)[0];
  return (y - x.narrow(1, 0, 2).sin()).square().mean() + (slope.norm(2, 1) - 1).square().mean();
}

TEST(SecondOrder, PenaltiesByInputsAreThoseOfOneProcess) {
  for (const Layout& layout : {Layout{1, 3}, Layout{2, 0}, Layout{3, 0}, Layout{3, 1}, Layout{2, 2}, Layout{3, 2},
                               Layout{2, 3}, Layout{3, 3}, Layout{5, 3}, Layout{4, 3, 2}, Layout{2, 3, 0, true}}) {
    on_ranks(layout.world, [&](std::shared_ptr<Communicator> comm) {
      auto reference = critic();
      torch::optim::SGD whole(reference->parameters(), 0.05);
      ZeroOptions options{.stage = layout.stage};
      options.fsdp.auto_wrap = wrap_modules<torch::nn::LinearImpl>();
      options.fsdp.hybrid.ranks_per_copy = layout.ranks_per_copy;
      options.fsdp.offload = {.params = layout.offload, .grads = layout.offload};
      auto model = zero(critic(), torch::optim::SGDOptions(0.05), comm, options);
      for (int step = 0; step < 3; ++step) {
        model.zero_grad();
        whole.zero_grad();
        loss_of(model, step, comm->rank()).backward();
        reference_backward(reference, layout.world, [&](int rank) { return loss_of(reference, step, rank); });
        model.step();
        whole.step();
      }
      auto state = model.full_state_dict();
      for (const auto& entry : reference->named_parameters())
        EXPECT_TRUE(torch::allclose(state[entry.key()], entry.value().detach(), 1e-10, 1e-12))
            << name_of(layout) << " " << entry.key() << " "
            << (state[entry.key()] - entry.value().detach()).abs().max().item<double>();
    });
  }
}

}  // namespace
}  // namespace tessera::second_order_test
