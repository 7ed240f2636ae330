// A step on GPUs, for tools/gpu_check.sh: gpu_step [ranks] [layers] [width]. A chain of Linear layers, a unit each, in
// bf16, under FSDP with and without offload; milliseconds a step and the device's memory, from rank 0.
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "tessera/tessera.h"

namespace {

constexpr int kWarmUp = 5, kSteps = 20;
constexpr int64_t kRows = 2048;
constexpr double kMiB = 1 << 20;

struct Shape {
  int layers;
  int64_t width;
};

double milliseconds_a_step(const Shape& shape, std::shared_ptr<tessera::Communicator> comm, bool offloads,
                           tessera::MemoryReport* memory) {
  torch::nn::Sequential net;
  for (int i = 0; i < shape.layers; ++i) net->push_back(torch::nn::Linear(shape.width, shape.width));
  net->to(comm->device());
  tessera::FsdpOptions options;
  options.auto_wrap = tessera::wrap_modules<torch::nn::LinearImpl>();
  options.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  options.offload = {.params = offloads, .grads = offloads};
  tessera::FullyShardedDataParallel fsdp(net, comm, options);
  const torch::optim::AdamWOptions adam(1e-4);
  tessera::AdamW on_device(fsdp.parameters(), adam);
  tessera::HostAdamW on_host(fsdp.parameters(), adam);
  torch::optim::Optimizer& optimizer =
      offloads ? static_cast<torch::optim::Optimizer&>(on_host) : static_cast<torch::optim::Optimizer&>(on_device);
  const at::Tensor x = torch::randn({kRows, shape.width}, comm->device());
  auto began = std::chrono::steady_clock::now();
  for (int step = 0; step < kWarmUp + kSteps; ++step) {
    if (step == kWarmUp) {
      comm->barrier();
      began = std::chrono::steady_clock::now();
    }
    optimizer.zero_grad();
    fsdp(x).square().mean().backward();
    fsdp.clip_grad_norm_on_device_(1.0);
    optimizer.step();
  }
  comm->barrier();  // which the host waits for
  *memory = fsdp.memory();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count() / kSteps;
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 1;
  const Shape shape{argc > 2 ? std::atoi(argv[2]) : 24, argc > 3 ? std::atoi(argv[3]) : 4096};
  tessera::InitOptions options;
  options.device = at::kCUDA;
  tessera::run_ranks(
      ranks,
      [&](std::shared_ptr<tessera::Communicator> comm) {
        for (const bool offloads : {false, true}) {
          tessera::MemoryReport memory;
          const double each_ms = milliseconds_a_step(shape, comm, offloads, &memory);
          if (comm->rank() == 0)
            std::printf("%d ranks, %d x Linear(%lld), bf16%s: %.2f ms a step; shards %.0f MiB, gathered at most %.0f\n",
                        ranks, shape.layers, static_cast<long long>(shape.width), offloads ? ", offload" : "", each_ms,
                        static_cast<double>(memory.shard_bytes) / kMiB,
                        static_cast<double>(memory.peak_gathered_bytes) / kMiB);
        }
      },
      options);
}
