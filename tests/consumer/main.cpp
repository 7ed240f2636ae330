// Trains a small model on two ranks, and checks that it has learned and that both ranks agree.

#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>
#include <exception>

// The consumer has no build type, so tessera::tessera must define NDEBUG.
#ifndef NDEBUG
#error "libtorch's headers need NDEBUG"
#endif

namespace {

constexpr int kSteps = 60;

// Returns the mean of the ranks' losses.
double mean_loss(const at::Tensor& loss, tessera::Communicator& comm) {
  at::Tensor mean = loss.detach().clone();
  comm.all_reduce(mean, tessera::ReduceOp::kAverage, "the loss").wait();
  return mean.item<double>();
}

// Fits y = sin(3 x), each rank on half of the interval, and returns {first, last loss}.
std::pair<double, double> train(const std::shared_ptr<tessera::Communicator>& comm) {
  torch::nn::Sequential model(torch::nn::Linear(1, 32), torch::nn::Tanh(), torch::nn::Linear(32, 32), torch::nn::Tanh(),
                              torch::nn::Linear(32, 1));
  tessera::FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = tessera::wrap_modules<torch::nn::LinearImpl>()});
  torch::optim::Adam optimizer(fsdp.parameters(), 1e-2);
  const at::Tensor x = torch::linspace(comm->rank() - 1.0, comm->rank(), 64).unsqueeze(1);
  double first = 0, last = 0;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = torch::mse_loss(fsdp(x), torch::sin(3 * x));
    loss.backward();
    optimizer.step();
    last = mean_loss(loss, *comm);
    if (step == 0) first = last;
  }
  const auto memory = fsdp.memory();
  if (2 * memory.shard_bytes >= memory.unsharded_bytes + 512) throw std::runtime_error("nothing was sharded");
  return {first, last};
}

}  // namespace

int main() {
  try {
    bool learned = true;
    tessera::run_ranks(2, [&](std::shared_ptr<tessera::Communicator> comm) {
      const auto [first, last] = train(comm);
      if (comm->rank() != 0) return;
      learned = last < 0.25 * first;
      std::printf("consumer: loss %.4f -> %.4f\n", first, last);
    });
    return learned ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "consumer: %s\n", error.what());
    return 1;
  }
}
