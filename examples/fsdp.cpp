// FullyShardedDataParallel, ZeRO stage 3: each of N ranks keeps 1/N of the parameters, gradients and optimizer state.
//
//   fsdp [--ranks N]                                  N processes on this host, 2 by default
//   torchrun --no-python --nproc-per-node 4 fsdp      or srun, mpirun: the launcher sets the number of ranks
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdlib>
#include <iostream>
#include <string>

namespace {

constexpr int64_t kWidth = 128, kBatch = 48;  // kBatch: rows of all ranks together

struct BlockImpl : torch::nn::Module {
  torch::nn::LayerNorm norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(kWidth, kWidth));
  at::Tensor forward(const at::Tensor& x) { return x + torch::gelu(linear(norm(x))); }
};
TORCH_MODULE(Block);

torch::nn::Sequential make_model() {
  torch::manual_seed(1);
  return torch::nn::Sequential(Block(), Block(), Block(), Block());
}

// This rank's rows of a step's batch. Any number of ranks that divides kBatch gives the same losses.
at::Tensor rows_of_step(int64_t step, const tessera::Communicator& comm) {
  torch::manual_seed(step);
  return torch::randn({kBatch, kWidth}).tensor_split(comm.size())[comm.rank()];
}

// Prints the mean loss of all ranks. Collective.
void print_loss(int64_t step, const at::Tensor& loss, tessera::Communicator& comm) {
  const auto mean = tessera::reduce_to_host(comm, loss.detach().clone(), tessera::ReduceOp::kAverage, "the loss");
  if (comm.rank() == 0) std::cout << "step " << step << ": loss " << mean.item<float>() << std::endl;
}

void train(const std::shared_ptr<tessera::Communicator>& comm) {
  auto model = make_model();  // any module, unchanged
  // Each block is a unit: its parameters are gathered before they are used and freed after.
  tessera::FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = tessera::wrap_modules<BlockImpl>()});
  torch::optim::AdamW optimizer(fsdp.parameters(), 1e-3);  // after wrapping: it steps this rank's shards
  if (comm->rank() == 0) std::cout << fsdp.describe();

  for (int64_t step = 0; step < 20; ++step) {
    const auto x = rows_of_step(step, *comm);
    optimizer.zero_grad();
    auto loss = torch::mse_loss(fsdp(x), x.sin());  // of this rank's rows
    loss.backward();                                // leaves the mean gradient of all ranks, 1/N on each
    fsdp.clip_grad_norm_(1.0);                      // the norm of the whole model's gradient
    optimizer.step();
    if (step % 5 == 0 || step == 19) print_loss(step, loss, *comm);
  }

  const auto memory = fsdp.memory();  // of this rank, in bytes
  std::cout << "rank " << comm->rank() << ": keeps " << memory.shard_bytes << " of " << memory.unsharded_bytes
            << " bytes of parameters, gathered at most " << memory.peak_gathered_bytes << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  const bool has_ranks = argc == 3 && std::string(argv[1]) == "--ranks";
  const std::string number = has_ranks ? argv[2] : argc == 1 ? "2" : "";
  const int ranks = std::atoi(number.c_str());
  if (ranks < 1 || ranks > 1024 || std::to_string(ranks) != number) return std::cerr << "usage: fsdp [--ranks N]\n", 2;
  if (!tessera::launched()) return tessera::spawn_local(ranks, argc, argv);  // processes on this host
  return tessera::run_main([] { train(tessera::init()); });  // an error is one line, and the exit code is 1
}
