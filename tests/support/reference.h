#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tessera/tessera.h"

namespace tessera::testing_support {

// Ranks are threads and share torch's default generator: one at a time seeds it and draws.
inline std::mutex generator_mutex;
template <class Draw>
auto seeded(uint64_t seed, Draw draw) {
  std::lock_guard lock(generator_mutex);
  torch::manual_seed(seed);
  return draw();
}

// run_ranks with one intra-operator thread a rank, so that results do not depend on the machine.
inline void on_ranks(int world, const std::function<void(std::shared_ptr<Communicator>)>& body) {
  run_ranks(world, [&](std::shared_ptr<Communicator> comm) {
    at::set_num_threads(1);
    body(std::move(comm));
  });
}

// Each parameter once, as the wrapper sees them.
inline std::vector<at::Tensor> unique_parameters(const torch::nn::Module& module) {
  std::vector<at::Tensor> unique;
  for (const auto& parameter : module.parameters()) {
    bool known = false;
    for (const auto& other : unique) known = known || other.is_same(parameter);
    if (!known) unique.push_back(parameter);
  }
  return unique;
}

// The specification of data-parallel training: one process, the parts of the batch one after the
// other, gradients added in rank order and divided by the number of parts. A parameter that no
// part used has no gradient; one that some parts did not use counts as 0 there.
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

// All parameters of the sharded model equal the reference's bit for bit.
template <class Wrapped>
void expect_same_parameters(Wrapped& fsdp, const torch::nn::Module& reference, const std::string& where) {
  auto state = fsdp.full_state_dict();
  for (const auto& parameter : reference.named_parameters()) {
    ASSERT_TRUE(state.contains(parameter.key())) << where << " " << parameter.key();
    EXPECT_TRUE(torch::equal(state[parameter.key()], parameter.value().detach()))
        << where << " " << parameter.key() << " differs by "
        << (state[parameter.key()] - parameter.value().detach()).abs().max();
  }
}

// Calls a wrapper, a module holder or a pointer to a module. (A holder's own operator() does not
// know what Sequential returns.)
template <class Net, class... Args>
auto call(Net& net, Args&&... args) {
  if constexpr (requires { net->forward(std::forward<Args>(args)...); }) {
    return net->forward(std::forward<Args>(args)...);
  } else {
    return net(std::forward<Args>(args)...);
  }
}

// What a call throws, "" if nothing.
template <class Error, class Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

inline void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

}  // namespace tessera::testing_support
