// A physics-informed network in fp64: solves -u'' = pi^2 sin(pi x) on [0, 1] with u(0) = u(1) = 0, whose solution is
// sin(pi x). The loss has second derivatives of the network by its input. Each rank has its own points. Trains with
// AdamW and then with L-BFGS, both on shards.
//
//   physics [ADAMW_STEPS [LBFGS_STEPS]]      500 and 20 by default
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <numbers>
#include <string>

namespace {

constexpr int64_t kWidth = 32, kPoints = 32;  // kPoints: points of each rank
constexpr double kPi = std::numbers::pi;
const auto kDouble = torch::TensorOptions(torch::kFloat64);

struct FieldImpl : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(1, kWidth));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(kWidth, kWidth));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(kWidth, 1));
  // Maps [points, 1] to [points, 1]. The factor x (1 - x) satisfies the boundary conditions.
  at::Tensor forward(const at::Tensor& x) { return x * (1 - x) * last(torch::tanh(second(torch::tanh(first(x))))); }
};
TORCH_MODULE(Field);
using Wrapped = tessera::FullyShardedDataParallel<Field>;

// Returns the derivative of each value by its own point. The result is differentiable.
at::Tensor derivative(const at::Tensor& values, const at::Tensor& x) {
  return torch::autograd::grad({values.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
}

// Returns the mean square of the equation's residual at this rank's points.
at::Tensor residual_loss(Wrapped& field, const at::Tensor& points) {
  const auto x = points.detach().requires_grad_();
  const auto curvature = derivative(derivative(field(x), x), x);
  return (curvature + kPi * kPi * torch::sin(kPi * x)).square().mean();
}

void train(int64_t adamw_steps, int64_t lbfgs_steps, const std::shared_ptr<tessera::Communicator>& comm) {
  torch::manual_seed(1);
  Field field;
  field->to(comm->device(), torch::kFloat64);  // before wrapping
  Wrapped fsdp(field, comm, {.auto_wrap = tessera::wrap_modules<torch::nn::LinearImpl>()});
  const auto on_device = kDouble.device(comm->device());

  auto print = [&](const std::string& stage, const at::Tensor& loss) {
    const auto x = torch::linspace(0, 1, 101, on_device).view({-1, 1});
    const torch::NoGradGuard no_grad;
    const auto error = (fsdp(x) - torch::sin(kPi * x)).abs().max().item<double>();
    const auto mean = tessera::reduce_to_host(*comm, loss.detach().clone(), tessera::ReduceOp::kAverage, "the loss");
    if (comm->rank() == 0)
      std::cout << stage << ": loss " << mean.item<double>() << ", largest error " << error << std::endl;
  };

  torch::manual_seed(comm->rank());
  torch::optim::AdamW adamw(fsdp.parameters(), 1e-2);
  tessera::WarmupCosineLR schedule(adamw, 0, std::max<int64_t>(adamw_steps, 1), 0.1);
  at::Tensor loss;
  for (int64_t step = 0; step < adamw_steps; ++step) {
    loss = residual_loss(fsdp, torch::rand({kPoints, 1}, on_device));  // new points in each step
    fsdp.zero_grad();
    loss.backward();
    adamw.step();
    schedule.step();
  }
  if (loss.defined()) print("AdamW", loss);

  // Uses fixed points, spread over the ranks, because all evaluations in a step of L-BFGS must be of the same loss.
  const auto all = torch::linspace(0, 1, kPoints * comm->size(), on_device).view({-1, 1});
  const auto own = all.tensor_split(comm->size())[comm->rank()];
  tessera::Lbfgs lbfgs(fsdp, tessera::LbfgsOptions(1).strong_wolfe(true));
  for (int64_t step = 0; step < lbfgs_steps; ++step) {
    loss = lbfgs.step([&] {
      fsdp.zero_grad();
      const auto now = residual_loss(fsdp, own);
      now.backward();
      return now;
    });
  }
  if (loss.defined()) print("L-BFGS", loss);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string adamw = argc > 1 ? argv[1] : "500", lbfgs = argc > 2 ? argv[2] : "20";
  const int adamw_steps = std::atoi(adamw.c_str()), lbfgs_steps = std::atoi(lbfgs.c_str());
  if (argc > 3 || adamw_steps < 1 || std::to_string(adamw_steps) != adamw || lbfgs_steps < 1 ||
      std::to_string(lbfgs_steps) != lbfgs)
    return std::cerr << "usage: physics [ADAMW_STEPS [LBFGS_STEPS]]\n", 2;
  if (!tessera::launched()) return tessera::spawn_local(2, argc, argv);
  return tessera::run_main([&] { train(adamw_steps, lbfgs_steps, tessera::init()); });
}
