#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/tessera.h"

namespace tessera {
namespace {

torch::nn::Sequential chain(int depth, int64_t width) {
  torch::nn::Sequential model;
  for (int i = 0; i < depth; ++i) {
    model->push_back(torch::nn::Linear(width, width));
    model->push_back(torch::nn::Tanh());
  }
  return model;
}

TEST(Smoke, Trains) {
  for (int world : {1, 2, 3}) {
    run_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      static std::mutex seeding;
      torch::nn::Sequential model{nullptr}, reference{nullptr};
      at::Tensor x, y;
      {
        std::lock_guard lock(seeding);
        torch::manual_seed(1);
        model = chain(4, 16);
        torch::manual_seed(1);
        reference = chain(4, 16);
        x = torch::randn({world * 2, 16});
        y = torch::randn({world * 2, 16});
      }
      FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
      torch::optim::Adam optimizer(fsdp.parameters(), 1e-2), reference_optimizer(reference->parameters(), 1e-2);
      if (comm->rank() == 0) std::cout << fsdp.describe();
      for (int step = 0; step < 5; ++step) {
        optimizer.zero_grad();
        auto loss = torch::mse_loss(fsdp(x.narrow(0, comm->rank() * 2, 2)), y.narrow(0, comm->rank() * 2, 2));
        loss.backward();
        optimizer.step();
        reference_optimizer.zero_grad();
        torch::mse_loss(reference->forward(x), y).backward();
        reference_optimizer.step();
      }
      auto state = fsdp.full_state_dict();
      for (auto& p : reference->named_parameters())
        EXPECT_TRUE(torch::allclose(state[p.key()], p.value(), 1e-4, 1e-5)) << p.key();
      auto m = fsdp.memory();
      if (comm->rank() == 0) std::cout << m.peak_gathered_bytes << " " << m.largest_unit_bytes << " " << m.gathered_bytes << " " << comm->traffic().sent_bytes << "\n";
    });
  }
}

}  // namespace
}  // namespace tessera
