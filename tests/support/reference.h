#pragma once

#include <c10/util/ScopeExit.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <tessera/tessera.h>
#include "tests/support/matrix.h"

namespace tessera::testing_support {
using namespace internal;

// The device of this thread's rank: the CPU, unless the program runs its tests on simulated devices
// (tests/support/accelerator/tests_on_devices.cpp).
inline thread_local at::Device rank_device = at::kCPU;
using RankBody = std::function<void(std::shared_ptr<Communicator>)>;
inline void (*run_ranks_on_devices)(int world, const RankBody& body) = nullptr;
// Returns `fewer` if on_ranks() uses devices, where tests are slow. Otherwise, and for the full matrix, returns `all`.
template <class T>
T fewer_on_devices(T all, T fewer) {
  return run_ranks_on_devices != nullptr && !has_full_matrix() ? std::move(fewer) : std::move(all);
}

// Whether ranks and a reference add in different orders, so that results may differ by rounding: true on GPUs
// (TESSERA_TEST_GPU), with NCCL and CUDA kernels. Elsewhere, results are bitwise equal.
inline bool adds_in_other_orders = false;
inline bool same_values(const at::Tensor& own, const at::Tensor& expected) {
  return adds_in_other_orders ? own.sizes() == expected.sizes() && torch::allclose(own, expected, 1e-4, 1e-4)
                              : torch::equal(own, expected);
}
// Returns an epsilon for Adam. With a small one, Adam's first steps have full length even for a gradient of pure
// rounding error, such as attention's key bias. If rounding differs, a larger epsilon shortens these steps.
inline double adam_eps() { return adds_in_other_orders ? 1e-2 : 1e-8; }

// Moves a tensor, a list of tensors or a holder's module to the rank's device. Returns deferred modules, which a
// wrapper moves, and other types unchanged.
template <class What>
What on_rank_device(What what) {
  if (rank_device.is_cpu()) return what;
  if constexpr (std::is_same_v<What, at::Tensor>) {
    return what.detach().to(rank_device).requires_grad_(what.requires_grad());
  } else if constexpr (std::is_same_v<What, std::vector<at::Tensor>>) {
    for (at::Tensor& each : what) each = on_rank_device(each);
  } else if constexpr (requires { what->to(rank_device); }) {
    const auto parameters = what->parameters();
    if (parameters.empty() || !is_deferred(parameters.front())) what->to(rank_device);
  }
  return what;
}

// Seeds torch's default generator, and returns draw(), moved to the rank's device. Ranks are threads that share the
// generator, so a lock serializes draws, which run on the CPU. Moves the result without the lock, because a copy waits
// for the device, which may wait for other ranks.
inline std::mutex generator_mutex;
template <class Draw>
auto seeded(uint64_t seed, Draw draw) {
  auto drawn = [&] {
    std::lock_guard lock(generator_mutex);
    const auto back = c10::make_scope_exit([before = std::exchange(rank_device, at::kCPU)] { rank_device = before; });
    torch::manual_seed(seed);
    return draw();
  }();
  return on_rank_device(std::move(drawn));
}

// Runs run_ranks() with one intra-operator thread per rank, so that results do not depend on the machine.
inline void on_ranks(int world, const RankBody& body) {
  auto run = [&](std::shared_ptr<Communicator> comm) {
    at::set_num_threads(1);
    const auto back =
        c10::make_scope_exit([before = std::exchange(rank_device, comm->device())] { rank_device = before; });
    body(std::move(comm));
  };
  run_ranks_on_devices != nullptr ? run_ranks_on_devices(world, run) : run_ranks(world, run);
}

// Returns each parameter once, like the wrapper.
inline std::vector<at::Tensor> unique_parameters(const torch::nn::Module& module) {
  std::vector<at::Tensor> unique;
  for (const auto& parameter : module.parameters()) {
    bool known = false;
    for (const auto& other : unique) known = known || other.is_same(parameter);
    if (!known) unique.push_back(parameter);
  }
  return unique;
}

// Steps two optimizers, after backward() has set the gradients of both.
template <class Backward>
void step_both(torch::optim::Optimizer& sharded, torch::optim::Optimizer& whole, Backward backward) {
  sharded.zero_grad();
  whole.zero_grad();
  backward();
  sharded.step();
  whole.step();
}

// Specifies data-parallel training: one process computes the parts of the batch in order, adds gradients in rank order,
// and divides them by the number of parts. If only some parts use a parameter, its gradients of the others are 0. If no
// part uses it, its gradient is unchanged.
template <class Model, class Loss>
void reference_backward(Model& model, int world, Loss loss_of_part) {
  auto parameters = unique_parameters(*model);
  std::vector<at::Tensor> sums(parameters.size());
  std::vector<at::Tensor> before;
  for (auto& parameter : parameters) {
    before.push_back(parameter.grad());
    parameter.mutable_grad() = at::Tensor();
  }
  for (int part = 0; part < world; ++part) {
    at::Tensor loss = loss_of_part(part);
    if (loss.requires_grad()) loss.backward();
    for (size_t i = 0; i < parameters.size(); ++i) {
      at::Tensor gradient = parameters[i].grad();
      parameters[i].mutable_grad() = at::Tensor();
      if (gradient.defined() || sums[i].defined()) {
        const at::Tensor zero = torch::zeros_like(parameters[i], at::TensorOptions().requires_grad(false));
        at::NoGradGuard no_grad;
        const at::Tensor own = gradient.defined() ? gradient : zero;
        sums[i] = sums[i].defined() ? sums[i] + own : (part == 0 ? own.clone() : zero + own);
      }
    }
  }
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!sums[i].defined()) {
      parameters[i].mutable_grad() = before[i];
      continue;
    }
    at::Tensor mean = sums[i] / world;
    parameters[i].mutable_grad() = before[i].defined() ? before[i] + mean : mean;
  }
}

// Expects all parameters of the sharded model to equal the reference's.
template <class Wrapped>
void expect_same_parameters(Wrapped& fsdp, const torch::nn::Module& reference, const std::string& where) {
  auto state = fsdp.full_state_dict();
  for (const auto& parameter : reference.named_parameters()) {
    ASSERT_TRUE(state.contains(parameter.key())) << where << " " << parameter.key();
    const at::Tensor expected = parameter.value().detach(), own = state[parameter.key()].to(expected.device());
    EXPECT_TRUE(same_values(own, expected))
        << where << " " << parameter.key() << " differs by " << (own - expected).abs().max();
  }
}

// Calls a wrapper, a module holder or a pointer to a module. (A holder's own operator() does not know Sequential's
// return type.)
template <class Net, class... Args>
auto call(Net& net, Args&&... args) {
  if constexpr (requires { net->forward(std::forward<Args>(args)...); }) {
    return net->forward(std::forward<Args>(args)...);
  } else {
    return net(std::forward<Args>(args)...);
  }
}

// Returns the message of the `Error` that `call` throws, or "" if it throws no exception.
template <class Error, class Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const testing::AssertionException&) {  // thrown by GoogleTest, for example to skip the test
    throw;
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

inline void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

}  // namespace tessera::testing_support
