#pragma once

#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <tessera/tessera.h>

namespace tessera::testing_support {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// Runs `body` on a thread for each rank. Returns each rank's error; "" if there is none.
inline std::vector<std::string> on_threads(int world, const std::function<void(int rank)>& body) {
  std::vector<std::string> errors(static_cast<size_t>(world));
  std::vector<std::thread> threads;
  // Creates the generator before the threads start: ThreadSanitizer does not see libtorch's synchronization of it.
  static_cast<void>(at::globalContext().defaultGenerator(at::kCPU));
  for (int rank = 0; rank < world; ++rank)
    threads.emplace_back([&, rank] {
      at::set_num_threads(1);
      try {
        body(rank);
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(rank)] = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return errors;
}

inline std::vector<std::string> no_errors(int world) { return std::vector<std::string>(static_cast<size_t>(world)); }

constexpr int64_t kWidth = 16;

struct Surrogate : torch::nn::Module {
  explicit Surrogate(int64_t width = kWidth) {
    hidden = register_module("hidden", torch::nn::Linear(3, width));
    middle = register_module("middle", torch::nn::Linear(width, width));
    out = register_module("out", torch::nn::Linear(width, 1));
    to(at::kDouble);
    // The same values on every rank, without the generator, which threads share.
    for (const at::Tensor& parameter : parameters()) {
      const at::NoGradGuard no_grad;
      parameter.copy_(torch::arange(parameter.numel(), at::kDouble).view(parameter.sizes()).mul(0.7).sin().mul(0.4));
    }
  }
  at::Tensor forward(const at::Tensor& x) { return out(torch::tanh(middle(torch::tanh(hidden(x))))); }
  torch::nn::Linear hidden = nullptr, middle = nullptr, out = nullptr;
};

inline at::Tensor inputs_of(int rank) { return torch::arange(24, at::kDouble).view({8, 3}).add(rank).mul(0.3).cos(); }

enum class Wrapper { kDdp, kOssSdp, kFsdp, kHybridFsdp };
// Trains the model for a few steps in fp64. The loss has energies and forces, which are gradients of energies, so
// backward computes second derivatives. Returns the parameters.
inline std::vector<at::Tensor> train_forces(const std::shared_ptr<Communicator>& comm, Wrapper wrapper,
                                            int64_t width = kWidth) {
  auto model = std::make_shared<Surrogate>(width);
  const at::Tensor x = inputs_of(comm->rank()).requires_grad_();
  const auto step = [&](auto& wrapped, torch::optim::Optimizer& optimizer) {
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      const at::Tensor energy = wrapped.forward(x).sum();
      const at::Tensor force = torch::autograd::grad({energy}, {x}, {}, true, /*create_graph=*/true)[0];
      (energy.square() + force.square().sum()).backward();
      optimizer.step();
    }
  };
  std::vector<at::Tensor> values;
  const auto keep = [&](const auto& parameters) {
    for (const at::Tensor& parameter : parameters) values.push_back(parameter.detach().clone());
  };
  if (wrapper == Wrapper::kFsdp || wrapper == Wrapper::kHybridFsdp) {
    FsdpOptions options{.auto_wrap = wrap_modules<torch::nn::LinearImpl>()};
    if (wrapper == Wrapper::kHybridFsdp) options.hybrid.ranks_per_copy = 2;
    FullyShardedDataParallel fsdp(model, comm, options);
    torch::optim::Adam optimizer(fsdp.parameters(), 1e-2);
    step(fsdp, optimizer);
    const auto full = fsdp.summon_full_params();
    keep(model->parameters());
  } else if (wrapper == Wrapper::kDdp) {
    DistributedDataParallel ddp(model, comm);
    torch::optim::Adam optimizer(model->parameters(), 1e-2);
    step(ddp, optimizer);
    keep(model->parameters());
  } else {
    OSS<torch::optim::Adam> optimizer(model->parameters(), torch::optim::AdamOptions(1e-2), comm);
    ShardedDataParallel sdp(model, optimizer, comm);
    step(sdp, optimizer);
    keep(model->parameters());
  }
  return values;
}

// The largest difference from the same steps in one process, with the gradients of all ranks averaged.
inline double difference_from_reference(const std::vector<at::Tensor>& values, int world, int64_t width = kWidth) {
  auto model = std::make_shared<Surrogate>(width);
  torch::optim::Adam optimizer(model->parameters(), 1e-2);
  for (int i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    for (int rank = 0; rank < world; ++rank) {
      const at::Tensor x = inputs_of(rank).requires_grad_();
      const at::Tensor energy = model->forward(x).sum();
      const at::Tensor force = torch::autograd::grad({energy}, {x}, {}, true, /*create_graph=*/true)[0];
      ((energy.square() + force.square().sum()) / world).backward();
    }
    optimizer.step();
  }
  double most = 0;
  const auto expected = model->parameters();
  for (size_t i = 0; i < expected.size(); ++i)
    most = std::max(most, (values.at(i) - expected[i]).abs().max().item<double>());
  return most;
}

// Each operation of a group once, with even and uneven counts. Throws std::runtime_error with the name of one whose
// result is wrong.
inline void check_collectives(Communicator& comm, bool has_messages = true) {
  const int rank = comm.rank(), size = comm.size();
  const auto expect = [&](const char* what, const at::Tensor& own, const at::Tensor& expected) {
    if (!torch::equal(own, expected))
      throw std::runtime_error(c10::str(what, " on rank ", rank, " is ", own, ", expected ", expected));
  };
  const auto options = torch::TensorOptions(at::kDouble);
  const int64_t sum = static_cast<int64_t>(size) * (size + 1) / 2;
  const at::Tensor own = torch::full({4}, rank + 1, options);
  at::Tensor all = torch::empty({4 * size}, options);
  comm.all_gather(all, own).wait();
  expect("all_gather", all, torch::arange(1, size + 1, options).repeat_interleave(4));
  at::Tensor reduced = own.clone();
  comm.all_reduce(reduced).wait();
  expect("all_reduce", reduced, torch::full({4}, sum, options));
  reduced = own.clone();
  comm.all_reduce(reduced, ReduceOp::kAverage).wait();
  expect("average", reduced, torch::full({4}, static_cast<double>(sum) / size, options));
  reduced = torch::full({3}, rank, torch::kLong);
  comm.all_reduce(reduced, ReduceOp::kMax).wait();
  expect("maximum", reduced, torch::full({3}, size - 1, torch::kLong));
  at::Tensor shard = torch::empty({2}, options);
  comm.reduce_scatter(shard, torch::arange(2 * size, options).add(rank), ReduceOp::kAverage).wait();
  expect("reduce_scatter", shard,
         torch::arange(2 * rank, 2 * rank + 2, options).add(static_cast<double>(size - 1) / 2));
  std::vector<int64_t> counts;
  for (int r = 0; r < size; ++r) counts.push_back(r);
  const int64_t total = static_cast<int64_t>(size) * (size - 1) / 2;
  at::Tensor uneven = torch::empty({total}, options), part = torch::full({rank}, rank, options);
  comm.all_gather(uneven, part, counts).wait();
  std::vector<at::Tensor> parts;
  for (int r = 0; r < size; ++r) parts.push_back(torch::full({r}, r, options));
  expect("uneven all_gather", uneven, torch::cat(parts));
  comm.reduce_scatter(part, torch::ones({total}, options), ReduceOp::kSum, counts).wait();
  expect("uneven reduce_scatter", part, torch::full({rank}, size, options));
  const int root = size - 1;
  at::Tensor value = torch::full({5}, rank, options);
  comm.broadcast(value, root).wait();
  expect("broadcast", value, torch::full({5}, root, options));
  value = torch::full({5}, rank + 1, options);
  comm.reduce(value, root).wait();
  expect("reduce", value, torch::full({5}, rank == root ? sum : rank + 1, options));
  shard = torch::empty({2}, options);
  comm.scatter(shard, rank == root ? torch::arange(2 * size, options) : at::Tensor(), root).wait();
  expect("scatter", shard, torch::arange(2 * rank, 2 * rank + 2, options));
  const at::Tensor large = torch::full({200'000}, rank + 1, options);
  comm.all_reduce(large).wait();
  expect("large all_reduce", large, torch::full({200'000}, sum, options));
  comm.barrier();
  if (!has_messages) return;
  at::Tensor received = torch::empty({size}, options);
  const std::vector<int64_t> ones(static_cast<size_t>(size), 1);
  comm.all_to_all(received, torch::arange(size, options).add(10 * rank), ones, ones).wait();
  expect("all_to_all", received, torch::arange(size, options).mul(10).add(rank));
  if (const auto half = comm.split(rank % 2)) {
    value = torch::full({2}, 1, options);
    half->all_reduce(value).wait();
    expect("all_reduce of a part", value, torch::full({2}, half->size(), options));
  }
}

}  // namespace tessera::testing_support
