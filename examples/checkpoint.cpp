// Sharded checkpoints: saves every 10 steps and before it stops (Ctrl-C, SIGTERM), and a second run continues from the
// newest checkpoint, on any number of ranks.
//
//   checkpoint FOLDER STEPS [--ranks N]      N processes on this host, 2 by default
//   checkpoint out 20                        saves after steps 10 and 20
//   checkpoint out 40 --ranks 3              continues with step 20
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

// Returns the exit code.
int train(const std::string& folder, int64_t steps, const std::shared_ptr<tessera::Communicator>& comm) {
  auto model = make_model();
  tessera::FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = tessera::wrap_modules<BlockImpl>()});
  torch::optim::AdamW optimizer(fsdp.parameters(), 1e-3);

  int64_t step = 0;
  if (const auto loaded = tessera::load_newest_checkpoint(folder, fsdp, optimizer)) {
    step = loaded->extra["step"].get<int64_t>();
    if (comm->rank() == 0) std::cout << "loaded " << loaded->path.filename().string() << std::endl;
  }
  while (step < steps) {
    const auto x = rows_of_step(step, *comm);
    optimizer.zero_grad();
    auto loss = torch::mse_loss(fsdp(x), x.sin());
    loss.backward();
    optimizer.step();
    if (step % 5 == 0) print_loss(step, loss, *comm);
    const int signal = tessera::stop_requested(*comm);  // the same on all ranks
    if (++step % 10 == 0 || signal != 0)  // each rank writes its shards; a checkpoint is complete or absent
      tessera::save_checkpoint(folder + "/step-" + std::to_string(step), fsdp, optimizer, {{"step", step}});
    if (signal != 0) return 128 + signal;
  }
  tessera::save_full(folder + "/model.safetensors", fsdp);  // one file for other programs
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const bool has_ranks = argc == 5 && std::string(argv[3]) == "--ranks";
  const std::string folder = argc > 2 ? argv[1] : "", ranks_text = has_ranks ? argv[4] : argc == 3 ? "2" : "";
  const int64_t steps = argc > 2 ? std::strtoll(argv[2], nullptr, 10) : 0;
  const int ranks = std::atoi(ranks_text.c_str());
  if (folder.empty() || folder[0] == '-' || steps < 1 || std::to_string(steps) != argv[2] || ranks < 1 ||
      ranks > 1024 || std::to_string(ranks) != ranks_text)
    return std::cerr << "usage: checkpoint FOLDER STEPS [--ranks N]\n", 2;
  if (!tessera::launched()) return tessera::spawn_local(ranks, argc, argv);
  return tessera::run_main([&] { return train(folder, steps, tessera::init()); });
}
