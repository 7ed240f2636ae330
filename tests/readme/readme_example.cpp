#include <tessera/tessera.h>
#include <torch/torch.h>

#include <iostream>

int main(int argc, char** argv) {
  if (!tessera::launched()) return tessera::spawn_local(2, argc, argv);  // or torchrun, srun, mpirun
  auto comm = tessera::init();

  torch::nn::Sequential model;  // any module, unchanged
  for (int i = 0; i < 4; ++i) model->push_back(torch::nn::Linear(256, 256));
  tessera::FullyShardedDataParallel fsdp(
      model, comm, {.auto_wrap = tessera::wrap_modules<torch::nn::LinearImpl>()});  // a unit per Linear
  torch::optim::AdamW optimizer(fsdp.parameters(), 1e-3);                           // of this rank's shards

  torch::manual_seed(comm->rank());  // each rank has its own part of the batch
  for (int step = 0; step < 20; ++step) {
    auto x = torch::randn({32, 256});
    auto loss = torch::mse_loss(fsdp(x), x.tanh());
    optimizer.zero_grad();
    loss.backward();  // each rank gets its part of the mean gradient
    fsdp.clip_grad_norm_(1.0);
    optimizer.step();
    if (comm->rank() == 0) std::cout << "step " << step << ": loss " << loss.item<float>() << "\n";
  }
}
