// FullyShardedDataParallel with offload: shards, gradients and optimizer state stay in host memory, where the optimizer
// runs; activations are recomputed in backward. With a GPU (tessera::init({.backend = "nccl"})) only the units in use
// are on the device.
//
//   offload [--ranks N]                                  N processes on this host, 2 by default
//   torchrun --no-python --nproc-per-node 4 offload      or srun, mpirun: the launcher sets the number of ranks
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

struct ModelImpl : torch::nn::Module {
  torch::nn::ModuleList blocks = register_module("blocks", torch::nn::ModuleList(Block(), Block(), Block(), Block()));
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : *blocks) x = tessera::checkpointed(std::dynamic_pointer_cast<BlockImpl>(block), x);
    return x;
  }
};
TORCH_MODULE(Model);

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
  torch::manual_seed(1);
  Model model;
  tessera::FullyShardedDataParallel fsdp(
      model, comm, {.auto_wrap = tessera::wrap_modules<BlockImpl>(), .offload = {.params = true, .grads = true}});
  tessera::HostAdamW optimizer(fsdp.parameters(), torch::optim::AdamWOptions(1e-3));  // a fast AdamW for host memory

  for (int64_t step = 0; step < 20; ++step) {
    const auto x = rows_of_step(step, *comm);
    optimizer.zero_grad();
    auto loss = torch::mse_loss(fsdp(x), x.sin());
    loss.backward();
    fsdp.clip_grad_norm_(1.0);
    optimizer.step();
    if (step % 5 == 0 || step == 19) print_loss(step, loss, *comm);
  }

  const auto memory = fsdp.memory();  // of this rank, in bytes
  std::cout << "rank " << comm->rank() << ": keeps " << memory.host_bytes << " bytes in host memory, gathered at most "
            << memory.peak_gathered_bytes << " of parameters" << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  const bool has_ranks = argc == 3 && std::string(argv[1]) == "--ranks";
  const std::string number = has_ranks ? argv[2] : argc == 1 ? "2" : "";
  const int ranks = std::atoi(number.c_str());
  if (ranks < 1 || ranks > 1024 || std::to_string(ranks) != number)
    return std::cerr << "usage: offload [--ranks N]\n", 2;
  if (!tessera::launched()) return tessera::spawn_local(ranks, argc, argv);  // processes on this host
  return tessera::run_main([] { train(tessera::init()); });  // an error is one line, and the exit code is 1
}
